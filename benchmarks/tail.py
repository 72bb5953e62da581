"""The fused tail of the backward against the three stages that it replaces, in one run on the same tensors.

    python benchmarks/tail.py

Medians of CUDA-graph replays with the L2 flushed before each, the two taking turns; random tensors, bf16, K = V = 128,
normalised q and k. The separate stages run over slices of value heads as the chain runs them. A floor is the bytes over
the bandwidth; GB/s are of the bytes that must move.
"""

from __future__ import annotations

import click
import torch
from gpu import BANDWIDTH, CHUNK, ELEMENT, D, graph_of, latencies, machine, table, work_of_stages

from cake_gdn_det import _C

SHAPES = [
    (1, 8192, 16, 32),
    (1, 32768, 16, 32),
    (1, 32768, 16, 16),
    (1, 32768, 16, 48),
    (8, 4096, 16, 64),
    (1, 65536, 16, 32),
]
SLICE_BYTES = 256 << 20  # of the parts of dq, dk and dw, as in csrc/plan/gpu.cpp
SEPARATE = ("dqkwg", "wy_backward", "finalize")


class Problem:
    """Random tensors of one shape, and the params of the stages that read them."""

    def __init__(self, B: int, T: int, H: int, HV: int):
        assert T % CHUNK == 0
        self.shape, self.group = (B, T, H, HV), HV // H
        rows, chunks, slots = B * T, B * T // CHUNK, B * ((T - 1) // CHUNK)
        random = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        scalars = lambda: torch.rand(HV, rows, device="cuda")  # noqa: E731
        self.q, self.k = (torch.nn.functional.normalize(random(rows, H, D), dim=-1) for _ in range(2))
        self.v, self.d_o, self.v_new, self.du = (random(rows, HV, D) for _ in range(4))
        self.h, self.dh = (random(slots, HV, D, D) for _ in range(2))
        self.A = random(rows, HV, CHUNK).mul_(0.01)
        self.cum, self.step, self.reset = -scalars(), scalars(), torch.zeros(HV, rows, device="cuda", dtype=torch.uint8)
        self.rstd = torch.ones(rows, H, device="cuda")
        self.dq, self.dk, self.dv = random(rows, H, D), random(rows, H, D), random(rows, HV, D)
        self.dstep, self.dcum = scalars(), scalars()
        tokens = torch.arange(chunks, device="cuda") * CHUNK
        self.chunks = torch.stack([tokens, tokens // T | CHUNK << 32], 1).contiguous()
        self.sequence_chunk = torch.arange(B + 1, device="cuda") * (T // CHUNK)
        slices = min(H, -(-3 * rows * HV * D * ELEMENT // SLICE_BYTES))
        self.slice = -(-H // slices) * self.group
        self.parts = [random(rows, self.slice, D) for _ in range(3)]

    def fields(self, *names: str, begin: int = 0, heads: int | None = None) -> dict:
        B, T, H, HV = self.shape
        rows = {"q": H, "k": H, "v": HV, "d_o": HV}
        out = {"device": torch.cuda.current_device(), "dtype": _C.BF16, "B": B, "T": T, "N": B, "H": H, "HV": HV}
        out |= {"K": D, "V": D, "head_begin": begin, "heads": heads or HV, "stored_begin": 0, "stored_heads": HV}
        out |= {"max_chunks": len(self.chunks), "chunks": self.chunks.data_ptr()}
        out |= {"sequence_chunk": self.sequence_chunk.data_ptr(), "cum": self.cum.data_ptr()}
        out |= {"reset": self.reset.data_ptr(), "dcum": self.dcum.data_ptr()}
        for name in names:
            out[name] = getattr(self, name).data_ptr()
            if name in rows:
                out |= self.layout(name, rows[name])
        return out

    def layout(self, name: str, heads: int) -> dict:
        return {f"{name}_batch": self.shape[1] * heads * D, f"{name}_token": heads * D, f"{name}_head": D}

    def outputs(self, *names: str) -> dict:
        out = {}
        for name in names:
            heads = self.shape[3] if name == "dv" else self.shape[2]
            out |= {name: getattr(self, name).data_ptr(), f"{name}_column": 1} | self.layout(name, heads)
        return out

    def tail(self) -> None:
        fields = self.fields("q", "k", "v", "d_o", "step", "A", "v_new", "du", "h", "dh", "dstep")
        fields |= self.outputs("dq", "dk", "dv")
        fields |= {"scale": D**-0.5, "h_heads": self.shape[3], "q_rstd": self.rstd.data_ptr()}
        fields["k_rstd"] = self.rstd.data_ptr()
        _C.tail(_C.TailParams(**fields), torch.cuda.current_stream().cuda_stream)

    def separate(self) -> None:
        B, T, H, HV = self.shape
        stream = torch.cuda.current_stream().cuda_stream
        dq, dk, dw = (x.data_ptr() for x in self.parts)
        for begin in range(0, HV, self.slice):
            heads = min(self.slice, HV - begin)
            mine = {"begin": begin, "heads": heads}
            fields = self.fields("q", "k", "d_o", "v_new", "du", "h", "dh", **mine)
            fields |= {"scale": D**-0.5, "h_heads": HV, "dq": dq, "dk": dk, "dw": dw}
            _C.dqkwg(_C.DqkwgParams(**fields), stream)
            fields = self.fields("k", "v", "step", "A", "v_new", "du", "dstep", **mine) | self.outputs("dv")
            _C.wy_backward(_C.WyBackwardParams(**fields | {"dw": dw, "dk": dk}), stream)
            first = begin // self.group
            for name, parts in (("dq", dq), ("dk", dk)):
                x = {"dq": self.q, "dk": self.k}[name]
                fields = {"device": torch.cuda.current_device(), "dtype": _C.BF16, "B": B, "T": T, "K": D}
                fields |= {"H": heads // self.group, "group": self.group, "parts": parts, "x_heads": H}
                fields |= {"x": x[:, first:].data_ptr(), "rstd": self.rstd[:, first:].data_ptr()}
                layout = self.outputs(name)
                fields |= {"dx" + field.removeprefix(name): value for field, value in layout.items()}
                fields["dx"] = getattr(self, name)[:, first:].data_ptr()
                _C.finalize(_C.FinalizeParams(**fields), stream)


@click.command(help=__doc__)
@click.option("--rounds", default=20, show_default=True)
@click.option("--shape", "chosen", type=int, multiple=True, help="Index into the shapes; default: all.")
def main(rounds: int, chosen: tuple[int, ...]) -> None:
    lines = []
    for shape in [SHAPES[i] for i in chosen] or SHAPES:
        problem = Problem(*shape)
        ms = latencies({"tail": graph_of(problem.tail), "separate": graph_of(problem.separate)}, rounds)
        work = work_of_stages(*shape)
        floor = 1e3 * work["tail"][0] / BANDWIDTH
        separate = 1e3 * sum(work[name][0] for name in SEPARATE) / BANDWIDTH
        B, T, H, HV = shape
        lines.append([f"{B} x {T}, {H}/{HV}", f"{ms['separate']:.3f}", f"{separate:.3f}", f"{ms['tail']:.3f}"])
        lines[-1] += [f"{floor:.3f}", f"{floor / ms['tail']:.0%}", f"{ms['separate'] / ms['tail']:.2f}"]
        del problem
        torch.cuda.empty_cache()
    header = ["B x T, H/HV", "separate ms", "floor ms", "fused ms", "floor ms", "of the floor", "speedup"]
    click.echo(f"{machine()}\n\n{table(header, lines)}")


if __name__ == "__main__":
    main()
