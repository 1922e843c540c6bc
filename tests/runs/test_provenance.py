import platform

import pytest

from gemsmith.runs.run import host_info


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f\n\nmodel name\t: another", "AMD EPYC ({}, AVX-512)"),
        ("model name : Xeon: v4\nflags : avx avx2\n", "Xeon: v4 ({}, AVX2)"),
        ("model name : old\nflags : sse2\n", "old ({})"),
        ("processor : 0\nFeatures : asimd\n", "{}"),  # as ARM has it
        (None, "{}"),
    ],
)
def test_a_machine_names_its_processor_and_its_widest_vectors(tmp_path, monkeypatch, cpuinfo, expected):
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr("gemsmith.runs.run._CPUINFO", file)
    assert host_info().processor == expected.format(platform.machine())
