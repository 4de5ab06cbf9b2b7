"""Asks Triton's compiler about our kernels without a GPU: ``python -m tests.impls.compile_triton QUESTION``.

``resources`` compiles the tiles that the rule picks on an H200 to cubins for sm_90 and prints, for each, what
ptxas allotted. ``variants`` prints how many specialisations 20 batches ask the JIT for. ``space`` prints, for some
of the tiles that a tuner tries, the shared memory that was predicted and that was allotted. ``launches`` prints how
2000 launches of many layouts went, and how many reached a kernel compiled for another layout. All print JSON.

A process of its own, because a process that interprets Triton kernels cannot compile them.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from harness.inputs import make_inputs
from impls import triton_tile
from impls.problem import DecodeProblem
from impls.splitkv_plan import WORK
from impls.triton_combine import FORMS, combine_form, combine_kernel
from impls.triton_exchange import pairs_at_a_time
from impls.triton_launch import Launch
from impls.triton_splitkv import TUNING, TritonPlan, decide, split_kernel
from impls.triton_tile import CPU, Tile, block_d, choose_tile, sm_90

SM_90 = GPUTarget("cuda", 90, 32)
H200 = sm_90(132)
POINTEES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


def compile_kernel(kernel: JITFunction, dtype: str, constants: dict[str, Any], **options: int) -> dict[str, int]:
    """Registers, stack bytes and shared memory of a kernel, with the attributes that the JIT gives it on aligned
    tensors: pointers and strides are multiples of 16; what is not specialised has none."""
    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr"):
            signature[name] = "*" + POINTEES[dtype]
        elif name in ("items_ptr", "merges_ptr", "rounds_ptr"):
            signature[name] = "*i32"
        elif name == "partial_ptr" and constants.get("EXCHANGE"):
            signature[name] = "*i64"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
        if not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=SM_90, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, f"cuobjdump: expected a resource line, got {report!r}"
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared}


def compile_split(head_dim: int, dtype: str, tile: Tile, exchange: int = 0) -> dict[str, int]:
    problem = DecodeProblem(kv_lens=(), heads_q=1, heads_kv=1, head_dim=head_dim, dtype=dtype)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_H": tile.block_h,
        "BLOCK_N": tile.block_n,
        "PARTS": triton_tile.parts(problem, tile),
        "OPERAND": getattr(tl, dtype),
        "PDL": True,
        "EXCHANGE": exchange,
        "NUM_WARPS": tile.num_warps,
        "EAGER": tile.eager,
        "HOLD": triton_tile.holds_v(problem, tile),
    }
    return compile_kernel(split_kernel, dtype, constants, num_stages=tile.num_stages, num_warps=tile.num_warps)


def resources() -> dict[str, dict[str, int]]:
    """What ptxas allotted, by kernel."""
    shapes = [
        *((dim, "bfloat16", group) for dim in HEAD_DIMS for group in (4, 24, 64)),
        *((dim, "float32", 4) for dim in HEAD_DIMS),
        (128, "float16", 4),
    ]
    out = {}
    for head_dim, dtype, group in shapes:
        problem = DecodeProblem(kv_lens=(), heads_q=8 * group, heads_kv=8, head_dim=head_dim, dtype=dtype)
        for work in WORK:
            tile = choose_tile(problem, H200, TUNING, work=work)
            name = f"d{head_dim} {dtype} {tile.block_h}x{tile.block_n}x{tile.num_stages} {work}"
            out[f"split {name}"] = compile_split(head_dim, dtype, tile)
            if dtype == "float32":  # never exchanged
                continue
            pairs = pairs_at_a_time(group, tile.block_h, head_dim, tile.num_warps)
            out[f"exchange {name} {pairs}"] = compile_split(head_dim, dtype, tile, pairs)
    for head_dim in HEAD_DIMS:
        for splits_max in FORMS:
            form, warps = combine_form(head_dim, splits_max)
            out[f"combine d{head_dim} {splits_max}"] = compile_kernel(
                combine_kernel, "bfloat16", {**form, "PDL": True}, num_warps=warps
            )
    return out


def variants() -> dict[str, int]:
    """Distinct specialisations, by kernel, that the JIT would compile for 20 batches of one shape."""
    keys: dict[str, set[str]] = {"split": set(), "combine": set()}
    for name, kernel in (("split", split_kernel), ("combine", combine_kernel)):
        bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(SM_90))

        def record(*args: Any, grid: Any, warmup: bool, name: str = name, bind: Any = bind, **kwargs: Any) -> None:
            _, specialization, options = bind(*args, **kwargs)
            keys[name].add(f"{specialization} {options}")

        kernel.run = record
    for b in range(20):
        lens = tuple((37 * b + 16 * i) % 211 for i in range(1 + b % 5))
        problem = DecodeProblem(kv_lens=lens, heads_q=8, heads_kv=2, head_dim=64)
        many = {16: 20, 17: 40, 18: 100}.get(b)  # a form of the combine kernel each
        if many is not None:
            lens = (300 + b,)
        tuning = {**TUNING, "num_splits": many or 1 + len(lens)}
        tile = choose_tile(problem, CPU, tuning, work="short")
        splitting = decide(problem, replace(H200, sms=CPU.sms), tuning, tile)
        plan = TritonPlan(problem, torch.device("cpu"), tuning, tile, splitting)
        plan.run(make_inputs(problem, b, "cpu"), plan.new_output())
    return {name: len(found) for name, found in keys.items()}


def space() -> dict[str, list[int]]:
    """Bytes of shared memory, predicted and allotted, by tile."""
    out = {}
    for head_dim, *shape in (
        (128, 128, 16, 4, 4),
        (64, 64, 16, 2, 8),
        (64, 64, 16, 2, 4),
        (64, 64, 16, 3, 4),
        (64, 128, 16, 2, 4),
        (64, 128, 16, 3, 4),
        (128, 64, 64, 2, 4),
        (96, 32, 32, 3, 4),
        (128, 128, 16, 3, 4, True),
        (128, 64, 16, 4, 4, True),
        (64, 128, 16, 3, 4, True),
        (256, 64, 16, 3, 4, True),
    ):
        problem = DecodeProblem(kv_lens=(), heads_q=8, heads_kv=8, head_dim=head_dim)
        tile = Tile(*shape)
        predicted = triton_tile.tile_bytes(problem, tile, wgmma=tile.block_h >= 64)
        # Where they merge by exchange, what fits an SM decides whether all CTAs are there at once.
        pairs = pairs_at_a_time(problem.group, tile.block_h, head_dim, tile.num_warps) if tile.eager else 0
        out[f"d{head_dim} {tile} {pairs}"] = [
            predicted,
            compile_split(head_dim, problem.dtype, tile, pairs)["shared"],
        ]
    return out


class Address:
    """What a launch sees of a tensor on a GPU: an address and a dtype."""

    is_cuda = True

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def launches() -> dict[str, int]:
    """Launches of the split kernel through the JIT and past it, the JIT's specialisations, and mistaken kernels."""
    bind = create_function_from_signature(split_kernel.signature, split_kernel.params, make_backend(SM_90))
    count = {"jit": 0, "direct": 0, "wrong": 0}
    specialisations = set()

    class Compiled(CompiledKernel):
        """Knows what it was compiled for, and finds it again in the arguments of a launch."""

        def __init__(self, specialisation: str) -> None:
            self.specialisation = specialisation

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any) -> None:
                count["direct"] += 1
                count["wrong"] += str(bind(*args)[1]) != self.specialisation

            return launch

    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        count["jit"] += 1
        specialisation = str(bind(*args, **kwargs)[1])
        specialisations.add(specialisation)
        return Compiled(specialisation)

    split_kernel.run = run
    torch.cuda.current_device = lambda: 0
    constants = {"HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_H": 16, "BLOCK_N": 64, "PARTS": 4}
    constants |= {"OPERAND": tl.float16, "PDL": True, "EXCHANGE": 0, "NUM_WARPS": 4, "EAGER": True, "HOLD": True}
    launch = Launch(split_kernel, 8, (8, 4, 2, 1, 0.1, 0), constants, {"num_warps": 4})
    draw = random.Random(1)
    for _ in range(2000):
        dtypes = [torch.float16] * 4 + [torch.float32] * 3 + [torch.int32] * 2
        offsets, strides = [0] * 9, [64] * 6
        unusual = [(dtypes, [torch.bfloat16]), (offsets, [2, 8, 32]), (strides, [1, 72, 80, 2**31, 2**31 + 8])]
        for _ in range(draw.randrange(3)):  # nothing unusual, or one or two things
            usual, values = draw.choice(unusual)
            usual[draw.randrange(len(usual))] = draw.choice(values)
        addresses = [4096 * draw.randrange(1, 2**30) + offset for offset in offsets]
        launch(tuple(map(Address, addresses, dtypes)), tuple(strides))
    return {**count, "specialisations": len(specialisations)}


if __name__ == "__main__":
    questions = {"resources": resources, "variants": variants, "space": space, "launches": launches}
    print(json.dumps(questions[sys.argv[1]]()))
