"""TileLang's split kernel lowered for sm_90a, without a GPU."""

from __future__ import annotations

import tilelang
from tilelang import tvm

from impls.problem import DecodeProblem
from impls.tilelang_machines import MACHINES
from impls.tilelang_splitkv import TUNING, pass_configs, split_kernel
from impls.tilelang_tile import Tile, choose_tile, tile_bytes

HOPPER = MACHINES["sm_90a"]


def lowered(
    shape: DecodeProblem, cluster: int, *, exchange: bool = False, **choice: int
) -> tuple[str, list[int] | None, Tile]:
    """The CUDA source of the split kernel on sm_90a, the cluster that it is launched in, and the tile."""
    tile = choose_tile(HOPPER, shape, {**TUNING, **choice})
    heads = (shape.heads_q, shape.heads_kv, shape.head_dim)
    kernel = split_kernel(HOPPER, *heads, "bfloat16", **vars(tile), cluster=cluster, exchange=exchange)
    with (
        tvm.transform.PassContext(opt_level=3, config=pass_configs(HOPPER, tile)),
        tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}),
    ):
        artifact = tilelang.lower(kernel)
    (function,) = artifact.device_mod.functions.values()
    assert int(function.attrs["dyn_shared_memory_buf"]) == tile_bytes(HOPPER, shape, tile)
    dims = function.attrs.get("cluster_dims")
    return artifact.kernel_source, None if dims is None else [int(n) for n in dims], tile
