"""The check that ragged inputs are ragged: compiled, because it runs in every step."""

from ple_offload import native


@native.kernel()
def bad_query_start_loc(query_start_loc, num_ids):  # type: ignore[no-untyped-def]
    """Index of the first value that is wrong, or -1. It starts at 0, never falls, and ends within num_ids."""
    if query_start_loc[0] != 0:
        return 0
    for i in range(1, query_start_loc.size):
        if query_start_loc[i] < query_start_loc[i - 1] or query_start_loc[i] > num_ids:
            return i
    return -1
