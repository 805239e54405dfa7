"""Route `ipc` without a GPU: a worker in a thread and a client share a driver whose device memory is host memory.

The rows and flags that the worker writes there are compared with the reference, and drained by the model's own kernel, in
Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the client's devices are torch's")

from connector.rig import Inputs, Made, Rank, make, random_inputs, reference, same_bytes  # noqa: E402
from fake_driver import NAMES, FakeDriver  # noqa: E402
from ple_offload import cuda  # noqa: E402
from ple_offload.connector import ConnectorConfig  # noqa: E402
from ple_offload.connector.base import PortSpec  # noqa: E402
from ple_offload.connector.config import Limits  # noqa: E402
from ple_offload.connector.remote import RemoteTransport  # noqa: E402
from ple_offload.connector.shared_memory import SharedMemory  # noqa: E402
from ple_offload.errors import ConnectionLostError, CudaError, ProtocolError, StepError, UsageError  # noqa: E402
from ple_offload.ipc import words  # noqa: E402
from ple_offload.ipc.region import DEVICE_BLOCK_ROWS, PAGE, Layout  # noqa: E402
from ple_offload.worker import device as worker_device  # noqa: E402
from ple_offload.worker.server import PleOffloadWorker  # noqa: E402
from worker.test_serving import served, worker_thread  # noqa: E402

MAX_TOKENS, MAX_REQS, SLOTS = 5000, 8, 2  # 4 rows a token: two blocks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("ipc"), "F8_E4M3", num_layers=2)


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    driver = FakeDriver()
    before = cuda.set_driver(driver)
    yield driver
    cuda.set_driver(before)


@pytest.fixture
def worker(made: Made, fake: FakeDriver) -> Iterator[tuple[PleOffloadWorker, str]]:
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(worker_thread(served(made, stack)))


class Client:
    """A rank with memory on the fake's GPU: what a connector of route `ipc` does, without torch's streams."""

    def __init__(
        self, made: Made, fake: FakeDriver, address: str, *, memory: Any = None, gpu: int = 0, **options: Any
    ) -> None:
        options.setdefault("session", f"ipc-{id(self)}")
        self.made, self.fake = made, fake
        config = ConnectorConfig(MAX_TOKENS, MAX_REQS, max_concurrent_batches=SLOTS, route="ipc", **options)
        self.ports = [PortSpec(t.layer, "bf16", t.embed_dim) for t in made.spec.tables]
        self.memory = memory or SharedMemory(cuda.Cuda(torch.device("cuda", gpu), fake.activate))
        self.transport = RemoteTransport(config, self.ports, address, memory=self.memory)
        self.step = self.transport.counted

    def publish(self, inputs: Inputs) -> int:
        self.step += 1
        slot = self.transport.inputs(self.step)
        slot.input_ids[: len(inputs.ids)] = inputs.ids
        slot.query_start_loc[: len(inputs.starts)] = inputs.starts
        slot.ngram_context[: len(inputs.context)] = inputs.context
        self.transport.publish(self.step, len(inputs.starts) - 1, inputs.padded)
        return self.step

    def flags(self, layer: int, step: int) -> np.ndarray:
        """The flags of the step's slot [blocks], on the GPU."""
        places = self.memory.layout
        at = self.memory.address + places.flag(layer, step % SLOTS, 0)
        return self.fake.bytes(at, 8 * places.blocks[layer]).view(np.uint64)

    def wait(self, step: int, tokens: int) -> None:
        """Until every block of the step has a flag of it, on the GPU."""
        expected = self.transport.flag(step)
        used = max(1, -(-tokens * 4 // DEVICE_BLOCK_ROWS))
        until(
            lambda: all(
                set((self.flags(i, step)[:used] & ~np.uint64(words.FAILED)).tolist()) == {expected}
                for i in range(len(self.ports))
            )
        )

    def drain(self, step: int, tokens: int, out_rows: int) -> tuple[list[torch.Tensor], int]:
        """Each layer's values as a model gets them, and why they did not come, or 0."""
        pytest.importorskip("triton", reason="the model waits by a Triton kernel")
        from ple_offload.connector.drain_triton import CONTROL_WORDS, WHY_BITS, Drain

        control = torch.zeros(CONTROL_WORDS, dtype=torch.int64)
        control.copy_(torch.tensor([self.transport.flag(step), 4 * tokens, step % SLOTS, 1]))
        host = np.zeros(1 + SLOTS, np.int64)
        places, values = self.memory.layout, []
        for i, port in enumerate(self.ports):
            drain = Drain(
                self.transport.travelling_format(i),
                stage=self.memory.address + places.output(i, 0),
                flags=self.memory.address + places.flag(i, 0, 0),
                poison=host.ctypes.data,
                errors=host.ctypes.data + 8,
                slot_bytes=places.output(i, 1) - places.output(i, 0),
                blocks_per_slot=places.blocks[i],
                flag_rows=places.block_rows,
            )
            out = torch.full((out_rows, port.embed_dim), 9.0, dtype=torch.bfloat16)
            drain.run(control, out.view(out_rows * 4, -1))
            values.append(out)
        return values, int(host[1 + step % SLOTS]) % (1 << WHY_BITS)

    def stored(self, layer: int, step: int, inputs: Inputs) -> bool:
        """Whether the rows' bytes on the GPU are the step's, and zeros behind its requests."""
        table, places = self.made.spec.tables[layer], self.memory.layout
        rows = table.family.row_numbers_reference(inputs.ids, inputs.starts, inputs.context)
        raw = np.frombuffer(self.made.raw[table.layer], np.uint8).reshape(-1, table.row_bytes)
        wanted = np.zeros((inputs.padded, 4 * table.row_bytes), np.uint8)
        wanted[: inputs.tokens] = raw[rows].reshape(wanted[: inputs.tokens].shape)
        at = self.memory.address + places.output(layer, step % SLOTS)
        return np.array_equal(self.fake.bytes(at, wanted.size), wanted.reshape(-1))

    def run(self, inputs: Inputs) -> bool:
        step = self.publish(inputs)
        self.wait(step, inputs.padded)
        right = all(self.stored(i, step, inputs) for i in range(len(self.ports)))
        self.transport.release(step)
        return right

    def close(self) -> None:
        self.transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def until(true: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.001)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def works(made: Made, address: str) -> bool:
    """Another session, on the CPU, gets its rows."""
    inputs = random_inputs(np.random.default_rng(3), 20, 3)
    with Rank.of(made, address, session="another") as other:
        return other.right(other.run(inputs), inputs)


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_rows_and_flags_arrive_in_the_gpus_memory(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1]) as one:
        for tokens, reqs, padded in (
            (1, 1, 1),
            (700, 8, 900),
            (0, 1, 0),
            (0, 2, 5),
            (4096, 3, 4096),
            (4097, 3, 4097),
            (4000, 4, 5000),
        ):
            assert one.run(random_inputs(rng, tokens, reqs, padded=padded)), (tokens, padded)
    assert fake.in_use() == []


def test_the_models_kernel_reads_them_there(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1]) as one:
        inputs = [random_inputs(rng, 30 + i, 3, padded=40) for i in range(SLOTS)]
        steps = [one.publish(each) for each in inputs]  # two in flight
        for step, each in zip(steps, inputs, strict=True):
            one.wait(step, 40)
            values, error = one.drain(step, 40, 40)
            expected = [reference(t, made.raw[t.layer], each, "bf16") for t in made.spec.tables]
            assert error == 0
            assert all(same_bytes(found, wanted) for found, wanted in zip(values, expected, strict=True))


def test_the_models_kernel_waits_for_each_block(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    """A block whose flag is another step's gives NaN, the blocks before it are right."""
    with Client(made, fake, worker[1]) as one:
        inputs = random_inputs(rng, 4200, 3, padded=4200)
        step = one.publish(inputs)
        one.wait(step, 4200)
        expected = [reference(t, made.raw[t.layer], inputs, "bf16") for t in made.spec.tables]
        values, error = one.drain(step, 4200, 4200)
        assert error == 0
        assert all(same_bytes(found, wanted) for found, wanted in zip(values, expected, strict=True))
        for layer in range(2):
            one.flags(layer, step)[1] = one.transport.flag(step - 1)
        values, error = one.drain(step, 4200, 4200)
        assert error == 1
        assert all(same_bytes(found[:4096], wanted[:4096]) for found, wanted in zip(values, expected, strict=True))
        assert all(found[4096:].isnan().all() for found in values)


def test_a_wrong_row_number_of_a_later_part_is_named(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]
) -> None:
    with Client(made, fake, worker[1], request="rows") as one:
        one.step += 1
        numbers = one.transport.inputs(one.step).row_numbers
        for target in numbers:
            target[:] = 0
        numbers[1][4100, 0] = 1 << 40
        one.transport.publish(one.step, 1, 5000)
        one.wait(one.step, MAX_TOKENS)
        with pytest.raises(
            StepError, match=r"layer 3: in the rows from 16384 on: row number \d+ \(at index 16 of 3616\)"
        ):
            one.transport.explain(one.step)


def test_values_that_the_worker_decodes_arrive_too(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1], output="values") as one:
        inputs = random_inputs(rng, 33, 2, padded=33)
        step = one.publish(inputs)
        one.wait(step, 33)
        values, _ = one.drain(step, 33, 33)
        expected = [reference(t, made.raw[t.layer], inputs, "bf16") for t in made.spec.tables]
        assert all(same_bytes(found, wanted) for found, wanted in zip(values, expected, strict=True))


def test_a_flag_follows_its_rows_in_the_same_stream(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1]) as one:
        before = len(fake.calls)
        inputs = random_inputs(rng, 5000, 5, padded=5000)
        step = one.publish(inputs)
        one.wait(step, 5000)
        made_calls = [call for call in fake.calls[before:] if call[0] in ("cuMemcpyHtoDAsync", "cuStreamWriteValue64")]
        found = []
        for name, arguments, _ in made_calls:
            copies = name == "cuMemcpyHtoDAsync"
            stream, address = (arguments[3], arguments[0]) if copies else arguments[:2]
            found.append((stream, address - one.memory.address, copies))
        stream, places = found[0][0], one.memory.layout
        expected = []
        for layer in range(2):
            for block, num_bytes in ((0, 0), (1, DEVICE_BLOCK_ROWS * made.spec.tables[layer].row_bytes)):
                expected.append((stream, places.output(layer, step % SLOTS) + num_bytes, True))
                expected.append((stream, places.flag(layer, step % SLOTS, block), False))
        assert found == expected


def test_every_call_is_made_under_the_device_it_is_for(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1], gpu=1) as one:
        assert one.run(random_inputs(rng, 50, 2))
    current = {call[0]: set() for call in fake.calls}
    for name, _, device in fake.calls:
        current[name].add(device)
    client, context = torch.device("cuda", 1), "context of 1"
    to_find_it = {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"}
    assert all(current.pop(name) == {None} for name in to_find_it)
    assert current.pop("cuDeviceGetUuid") == {None, client}
    for name in ("cuMemAlloc", "cuMemFree", "cuIpcGetMemHandle", "cuMemsetD8Async"):
        assert current.pop(name) == {client}, name
    for name in ("cuStreamCreate", "cuStreamDestroy", "cuStreamQuery"):
        assert current.pop(name) == {client, context}, name
    assert set.union(*current.values()) == {context}, current


def test_flags_begin_as_zeros_whatever_lay_there(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]
) -> None:
    with Client(made, fake, worker[1]) as one:  # the fake allocates memory full of 0xAB
        assert one.memory.num_bytes == fake.allocated[one.memory.address].size  # what device_bytes counts
        for layer in range(2):
            for step in range(SLOTS):
                assert not one.flags(layer, step).any()


def test_a_step_that_fails_says_so_on_every_flag_and_the_next_one_is_right(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1]) as one:
        inputs = random_inputs(rng, 20, 2, padded=20)
        inputs.ids[7] = 123_456
        step = one.publish(inputs)
        one.wait(step, MAX_TOKENS)
        failed = one.transport.flag(step) | words.FAILED
        assert all(set(one.flags(i, step).tolist()) == {failed} for i in range(2))
        values, error = one.drain(step, 20, 20)
        assert all(each.isnan().all() for each in values)
        assert error == 2
        with pytest.raises(StepError, match=r"input_ids\[7\] = 123456"):
            one.transport.explain(step)
        one.transport.release(step)
        assert one.run(random_inputs(rng, 20, 2))


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_handle_that_the_driver_does_not_give_is_said_by_the_client(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]
) -> None:
    fake.refused["cuIpcGetMemHandle"] = 1
    with pytest.raises(CudaError, match=r"cuIpcGetMemHandle\(.*\) on cuda:0: .*Route 'ipc'.*use route 'staged'"):
        Client(made, fake, worker[1])
    assert fake.in_use() == []
    assert works(made, worker[1])


@pytest.mark.parametrize(
    "name", ["cuMemGetAddressRange", "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuDevicePrimaryCtxRetain"]
)
def test_whatever_the_driver_refuses_the_worker_is_given_back_and_said(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], name: str
) -> None:
    fake.refused[name] = 1
    with pytest.raises(ProtocolError, match=rf"refused: {name}\(.* on GPU {NAMES[0]}: CUDA_ERROR_FAKE"):
        Client(made, fake, worker[1])
    assert fake.in_use() == []
    assert works(made, worker[1])


def test_a_handle_that_does_not_open_is_refused(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]
) -> None:
    fake.refused["cuIpcOpenMemHandle"] = 1
    with pytest.raises(ProtocolError, match=r"refused: cuIpcOpenMemHandle\(.*one host.*else use route 'staged'"):
        Client(made, fake, worker[1])
    assert fake.in_use() == []
    assert works(made, worker[1])


def test_a_worker_without_a_driver_refuses(made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]) -> None:
    memory = Other(made, fake, uuid=NAMES[0])
    fake.no_library = True
    with pytest.raises(ProtocolError, match=r"refused: cuInit on GPU .*libcuda\.so\.1"):
        Client(made, fake, worker[1], memory=memory)
    assert memory.closed == [True]
    assert works(made, worker[1])


def test_a_worker_without_cuda_bindings_refuses(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise UsageError("GPU routes need cuda-bindings: pip install 'ple-offload[cuda]'.")

    memory = Other(made, fake, uuid=NAMES[0])
    monkeypatch.setattr(cuda, "driver", missing)
    with pytest.raises(ProtocolError, match="refused: GPU routes need cuda-bindings"):
        Client(made, fake, worker[1], memory=memory)
    assert works(made, worker[1])


class Other:
    """Memory that says something else than it is."""

    def __init__(self, made: Made, fake: FakeDriver, uuid: str = NAMES[0], num_bytes: int = 0, handle: Any = None):
        self.fake, self.uuid, self.num_bytes, self.handle = fake, uuid, num_bytes, handle
        self.address, self.closed = 0, []

    def share(self, layout: Layout) -> tuple[str, bytes]:
        self.layout = layout.on_device
        if self.handle is not None:
            return self.uuid, self.handle
        gpu = cuda.Cuda(torch.device("cuda", 0), self.fake.activate)
        if not self.fake.no_library and self.num_bytes:
            self.address = gpu.allocate(self.num_bytes)
            return self.uuid, gpu.share(self.address)
        return self.uuid, bytes(64)

    def close(self, let_go: bool) -> None:
        self.closed.append(let_go)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"uuid": "elsewhere"}, rf"GPU elsewhere: expected one of the GPUs .* found {NAMES[0]}, {NAMES[1]}"),
        ({"handle": bytes(64)}, "cuIpcOpenMemHandle"),
        ({"handle": bytes(63)}, "expected a GPU's UUID and 64 bytes, or neither, found .* and 63 bytes"),
        ({"handle": b""}, "and 0 bytes"),
        ({"uuid": "", "handle": bytes(64)}, "and 64 bytes"),
        ({"uuid": "x" * 101, "handle": bytes(64)}, "and 64 bytes"),
        ({"num_bytes": PAGE}, rf"handle: expected at least \d+ bytes on GPU {NAMES[0]}, found 4096"),
    ],
)
def test_a_device_or_memory_that_cannot_be_is_refused(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], options: dict[str, Any], reason: str
) -> None:
    memory = Other(made, fake, **options)
    with pytest.raises(ProtocolError, match=f"refused: .*{reason}"):
        Client(made, fake, worker[1], memory=memory)
    assert memory.closed == [True]
    fake.allocated.clear()
    assert fake.in_use() == []
    assert works(made, worker[1])


def test_the_route_is_for_gpus_only(made: Made, worker: tuple[PleOffloadWorker, str]) -> None:
    with pytest.raises(UsageError, match="route 'ipc': expected device 'cuda', found 'cpu'"):
        Rank.of(made, worker[1], route="ipc")


# ---- ends ---------------------------------------------------------------------------------------------------------


def test_ranks_of_a_gpu_share_its_context_until_the_last_has_gone(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    with Client(made, fake, worker[1]) as first:
        with Client(made, fake, worker[1]) as second, Client(made, fake, worker[1], gpu=1) as third:
            assert fake.contexts == [1, 1]
            assert all(one.run(random_inputs(rng, 40, 2)) for one in (first, second, third))
        assert fake.contexts == [1, 0]
        assert first.run(random_inputs(rng, 40, 2))
    assert fake.in_use() == []


def test_the_client_frees_its_memory_after_the_worker_has_closed_it(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str]
) -> None:
    Client(made, fake, worker[1]).close()
    names = [call[0] for call in fake.calls]
    assert names.index("cuIpcCloseMemHandle") < names.index("cuMemFree")
    assert names.index("cuMemHostUnregister") < names.index("cuMemFree")


def test_copies_under_way_are_waited_for_when_a_rank_ends(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    """A client that waits longer than its limit keeps the memory: the worker may still write there."""
    one = Client(made, fake, worker[1], limits=Limits(close_s=0.1))
    fake.hold = True
    step = one.publish(random_inputs(rng, 30, 2))
    flags = one.flags(0, step)
    until(lambda: any(fake.streams.values()))
    one.close()
    assert fake.opened
    assert fake.allocated
    assert not any(call[0] in ("cuMemFree", "cuMemHostUnregister") for call in fake.calls)
    assert not flags.any()
    fake.go()
    until(lambda: not fake.opened)
    until(lambda: not fake.contexts[0])
    assert not fake.registered


def test_a_gpu_that_hangs_keeps_the_worker_for_a_limited_time_only(
    made: Made,
    fake: FakeDriver,
    worker: tuple[PleOffloadWorker, str],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the client's memory for good: what the GPU writes once it wakes up must not be another's by then."""
    monkeypatch.setattr(worker_device, "CLOSE_LIMIT_S", 0.2)
    one = Client(made, fake, worker[1], limits=Limits(close_s=1))
    fake.hold = True
    one.publish(random_inputs(rng, 30, 2))
    until(lambda: any(fake.streams.values()))
    one.close()
    until(lambda: "Is the GPU hung?" in caplog.text)
    assert works(made, worker[1])
    assert fake.opened, "closed under a copy"
    assert fake.allocated, "freed under a copy"
    fake.go()


def test_a_client_that_dies_leaves_nothing_in_the_worker(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    one = Client(made, fake, worker[1])
    assert one.run(random_inputs(rng, 30, 2))
    one.publish(random_inputs(rng, 900, 2))
    one.transport._channel.abandon()  # as the kernel does for a process that was killed
    until(lambda: not (fake.opened or fake.registered or fake.streams or any(fake.contexts)))
    assert works(made, worker[1])
    one.close()


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync", "cuStreamWriteValue64"])
def test_a_driver_that_refuses_a_block_ends_that_rank_only(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator, name: str
) -> None:
    with Client(made, fake, worker[1]) as one:
        assert one.run(random_inputs(rng, 30, 2))
        fake.refused[name] = 1
        step = one.publish(random_inputs(rng, 30, 2))
        until(lambda: not one.transport.alive())
        with pytest.raises(ConnectionLostError, match=rf"it cut the connection: {name}\(.*CUDA_ERROR_FAKE"):
            one.transport.explain(step)
        assert not (one.flags(0, step) == one.transport.flag(step)).any()
        assert works(made, worker[1])
    assert fake.in_use() == []
    fake.refused.clear()
    with Client(made, fake, worker[1]) as again:
        assert again.run(random_inputs(rng, 30, 2))


def test_a_lost_tp_rank_takes_its_group_with_it_once(
    made: Made, fake: FakeDriver, worker: tuple[PleOffloadWorker, str], rng: np.random.Generator
) -> None:
    """Both ranks of the group see the refusal in the same step; each is ended once."""
    import threading

    ranks: list[Client] = []
    options: dict[str, Any] = {"session": "two", "tp_size": 2}
    other = threading.Thread(target=lambda: ranks.append(Client(made, fake, worker[1], tp_rank=1, **options)))
    other.start()
    first = Client(made, fake, worker[1], tp_rank=0, **options)
    other.join()
    second = ranks[0]
    inputs = random_inputs(rng, 40, 2)
    step = first.publish(inputs)
    for one in (first, second):
        one.wait(step, 40)
        assert all(one.stored(i, step, inputs) for i in range(2))
        one.transport.release(step)
    fake.refused["cuMemcpyHtoDAsync"] = 1
    first.publish(random_inputs(rng, 30, 2))
    for one in (first, second):
        until(lambda one=one: not one.transport.alive())
        one.close()
    assert worker[0]._sessions["two"].counters.lost_ranks == 1
    assert fake.in_use() == []
    assert works(made, worker[1])


def test_a_worker_that_stops_gives_everything_back(made: Made, fake: FakeDriver, rng: np.random.Generator) -> None:
    with contextlib.ExitStack() as stack:
        _, address = stack.enter_context(worker_thread(served(made, stack)))
        one = Client(made, fake, address)
        assert one.run(random_inputs(rng, 30, 2))
    assert fake.in_use() == [one.memory.address]
    one.close()
    assert fake.in_use() == []
