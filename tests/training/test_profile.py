"""--profile: the trace, and the summary of where the time of its steps went."""

import gzip
import json

import pytest

from meshwright.training.log import profile


def kernel(name, begin, duration, cat="kernel", tid=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": duration, "tid": tid}


def write(path, events):
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_shares_of_a_device(tmp_path):
    """Communication beside other work is hidden; each moment counts once, the CPU not at all."""
    events = [
        kernel("nvjet_hsh_256x128_64x4_TNT", 100, 40),
        kernel("void at::native::elementwise_kernel<128, 4>(int)", 130, 20),  # the last ten alone
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 150, 10),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 155, 15),
        kernel("Memset (Device)", 180, 10, "gpu_memset"),
        kernel("nvjet_hsh_256x128_64x4_TNT", 190, 10),
        kernel("aten::mm", 0, 500, "cpu_op"),
        kernel("ProfilerStep", 0, 900, "gpu_user_annotation"),
        {"ph": "M", "name": "process_name"},
    ]
    found = profile.summarise(write(tmp_path / "t.json.gz", events), 2)
    assert found is not None and found.ms == 0.05
    expected = {
        "matrix products": 0.5,
        "attention": 0.1,
        "memory-bound": 0.2,
        "communication": 0.1,
        "idle": 0.1,
    }
    assert found.shares == pytest.approx(expected) and found.hidden_communication == pytest.approx(
        0.05
    )
    assert [(k.name[:5], k.ms, k.calls) for k in found.kernels][:2] == [
        ("nvjet", 0.025, 1.0),
        ("void ", 0.01, 0.5),
    ]
    assert sum(k.share for k in found.kernels) == pytest.approx(1)
    lines = found.lines()
    assert lines[0].startswith(
        "0.05 ms a step: matrix products 50.0%, attention 10.0%, memory-bound 20.0%, "
    )
    assert any(line.endswith("elementwise_kernel<128, 4> (memory-bound)") for line in lines)


def test_own_time_of_operators_on_a_cpu(tmp_path):
    events = [
        kernel("aten::linear", 0, 100, "cpu_op"),
        kernel("aten::addmm", 20, 60, "cpu_op"),
        kernel("aten::copy_", 30, 10, "cpu_op"),
        kernel("aten::gelu", 110, 10, "cpu_op"),
        kernel("aten::bmm", 105, 10, "cpu_op", tid=8),  # of another thread
    ]
    found = profile.summarise(write(tmp_path / "t.json.gz", events), 1)
    assert {k.name: (round(1e3 * k.ms), k.calls) for k in found.kernels} == {
        "aten::linear": (40, 1),
        "aten::addmm": (50, 1),
        "aten::copy_": (10, 1),
        "aten::gelu": (10, 1),
        "aten::bmm": (10, 1),
    }
    expected = {
        "matrix products": 60 / 120,
        "attention": 0,
        "memory-bound": 55 / 120,
        "communication": 0,
    }
    assert found.shares == pytest.approx(expected | {"idle": 5 / 120})


@pytest.mark.parametrize(
    "name, kind",
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>",
            "matrix products",
        ),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::addmm", "matrix products"),
        ("aten::baddbmm", "matrix products"),
        ("aten::_scaled_mm", "matrix products"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("_symmetric_product", "matrix products"),
        ("_attend", "attention"),
        ("_norm_forward", "memory-bound"),
        ("_reduce_columns", "memory-bound"),
        ("multi_tensor_apply_kernel", "memory-bound"),
        ("Memcpy DtoD (Device -> Device)", "memory-bound"),
    ],
)
def test_kinds(name, kind):
    assert profile.kind_of_kernel(name) == kind


def test_a_trace_without_work(tmp_path):
    assert profile.summarise(write(tmp_path / "t.json.gz", []), 1) is None


@pytest.mark.flag("profile profile_step_start profile_step_end")
def test_profile(run, tmp_path):
    """From step 2 to 3, and until the run ends; small, because torch takes seconds for a table."""
    small = "--profile --num-layers 1 --eval-iters 0 --train-iters 3".split()
    got = run(*small, "--profile-step-start", 2, "--profile-step-end", 3)
    assert got.status == 0 and "Self CPU" in got.out
    folder = tmp_path / "run0" / "profile"
    assert json.loads(gzip.open(folder / "trace_2_3.json.gz").read())["traceEvents"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        sum(summary["shares"].values()) == pytest.approx(1)
        and summary["shares"]["matrix products"] > 0
    )
    assert len(summary["kernels"]) == 15 and 0 < summary["ms"] < got.column("ms")[1]
    assert (folder / "summary.txt").read_text() in got.out
    assert "Self CPU" in run(*small, "--profile-step-start", 3, "--profile-step-end", 100).out
    again = json.loads((tmp_path / "run1" / "profile" / "summary.json").read_text())
    assert again["kernels"][0]["calls"] >= 1  # one step, not 97
