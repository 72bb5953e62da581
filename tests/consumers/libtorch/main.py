"""Builds the extension against the installed package, then checks it against the token recurrence and its autograd.

python main.py <folder of the installed package> <build folder>
"""

import sys
from pathlib import Path

import torch
from torch.utils.cpp_extension import load


def recurrence(q, k, v, g, beta, scale):
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        r = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], r)
        out.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def main(root: Path, build: Path) -> None:
    library = root / "lib"
    build.mkdir(parents=True, exist_ok=True)
    extension = load(
        name="gdn_libtorch_consumer",
        sources=[str(Path(__file__).parent / "extension.cpp")],
        extra_include_paths=[str(root / "include")],
        extra_cflags=["-O1"],
        extra_ldflags=[f"-L{library}", "-lcake_gdn_det", f"-Wl,-rpath,{library}"],
        build_directory=str(build),
    )
    torch.manual_seed(0)
    B, T, H, HV, K, V = 2, 70, 2, 4, 16, 8
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, HV, V), (B, T, HV), (B, T, HV)]
    inputs = [torch.randn(*shape) * 0.3 for shape in shapes]
    inputs[3] = -inputs[3].abs()
    inputs[4] = inputs[4].sigmoid()
    weight = torch.randn(B, T, HV, V)
    results = []
    for function, dtype in ((extension.rule, torch.float32), (recurrence, torch.float64)):
        x = [t.to(dtype).requires_grad_() for t in inputs]
        o = function(*x, 0.25)
        results.append([o.detach(), *torch.autograd.grad(o, x, weight.to(dtype))])
    for name, got, want in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), *results, strict=True):
        error = ((got - want).norm() / want.norm()).item()
        print(f"{name}: relative error {error:.2e}")
        assert error < 1e-5, name
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
