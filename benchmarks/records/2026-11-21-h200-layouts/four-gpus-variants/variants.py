import sys

sys.path.insert(0, "benchmarks")
import gpu_layouts as g

from meshwright.parallel import layout, pipeline

C, Z1, Z3, P, V = g.Cell, g.ZERO1, g.ZERO3, g.PP2, g.VIRTUAL
real_early = pipeline.comes_early
S = (2, 4)
g.TRAINING = g.TRAINING.replace("--lr 1.5e-4", "--lr 3e-5").replace(
    "--lr-warmup-iters 5", "--lr-warmup-iters 20"
)
g.CELLS["2.7B"] = [
    C("one GPU", "", 8, 32, 1, (1, 3)),
    C("one GPU m16", "", 16, 32, 1, (1, 3)),
    C("DP4 ZeRO-3", Z3, 8, 64, 4, S),
    C("DP4 ZeRO-3 c8", Z3, 8, 64, 4, S),
    C("DP4 ZeRO-3 m16 c8", Z3, 16, 64, 4, S),
    C("DP4 ZeRO-3 m16", Z3, 16, 64, 4, S),
    C("PP2xDP2 late", f"{P} {Z1} --pipeline-layout 17,15", 2, 64, 4, S),
    C("PP2xDP2 late c4", f"{P} {Z1} --pipeline-layout 17,15", 2, 64, 4, S),
    C("PP2xDP2 early c4", f"{P} {Z1} --pipeline-layout 17,15", 2, 64, 4, S),
    C("PP2xDP2 interleaved late c4", f"{P} {Z1} {V} 8 --pipeline-layout 9,8,8,7", 4, 64, 4, S),
    C("TP2xDP2", f"{g.TP2} {Z1}", 8, 64, 4, S),
    # two GPUs
    C("DP2 ZeRO-3", Z3, 8, 32, 2, S),
    C("DP2 ZeRO-3 c8", Z3, 8, 32, 2, S),
    C("DP2 ZeRO-3 m16 c8", Z3, 16, 32, 2, S),
    C("DP2 ZeRO-3 m16", Z3, 16, 32, 2, S),
    C("PP2 late", f"{P} --pipeline-layout 17,15", 2, 32, 2, S),
    C("PP2 late c4", f"{P} --pipeline-layout 17,15", 2, 32, 2, S),
    C("PP2 early c4", f"{P} --pipeline-layout 17,15", 2, 32, 2, S),
    C("PP2 interleaved late c4", f"{P} {V} 8 --pipeline-layout 9,8,8,7", 4, 32, 2, S),
]
g.CELLS["tiny"] = [
    C(
        c.name,
        c.flags.replace("17,15", "5,3").replace("9,8,8,7", "3,2,2,1").replace(f"{V} 8", f"{V} 2"),
        2,
        16,
        c.ranks,
        (1, 2),
    )
    for c in g.CELLS["2.7B"]
]
line = g.line_of


def line_of(model, cell, given):
    words = cell.name.split()
    layout.CTAS.clear()
    for w in words:
        if w[0] == "c" and w[1:].isdigit():
            n = int(w[1:])
            layout.CTAS.update({"lanes": n} if "PP" in cell.name else {"shard": n, "gradients": n})
    pipeline.comes_early = (lambda *a: False) if "late" in words else real_early
    return line(model, cell, given)


g.line_of = line_of
g.main()
