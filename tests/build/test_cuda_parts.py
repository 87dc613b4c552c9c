"""Search for CUDA's headers and libraries in the toolkit and in pip wheels. CUDA's headers and libraries, except NCCL,
must have the same major version."""

import re
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hostweave.build import cuda


def write_files(root: Path, texts: dict[str, str]) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


CUDA12 = {
    "cuda_runtime/include/cuda_runtime_api.h": "#define CUDART_VERSION  12090\n",
    "cuda_runtime/lib/libcudart.so.12": "",
    "cuda_nvcc/include/crt/host_defines.h": "",
    "cuda_cccl/include/nv/target": "",
    "cublas/include/cublas_api.h": "#define CUBLAS_VER_MAJOR 12\n",
    "cublas/include/cublasLt.h": "",
    "cublas/lib/libcublasLt.so.12": "",
    "nccl/include/nccl.h": "",
    "nccl/lib/libnccl.so.2": "",
    "cuda_nvrtc/lib/libnvrtc.so.12": "",
}
CUDA13 = {
    "cu13/include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
    "cu13/include/crt/host_defines.h": "",
    "cu13/include/cccl/nv/target": "",
    "cu13/include/cublas_api.h": "#define CUBLAS_VER_MAJOR 13\n",
    "cu13/include/cublasLt.h": "",
    "cu13/lib/libcudart.so.13": "",
    "cu13/lib/libcublasLt.so.13": "",
    "cu13/lib/libnvrtc.so.13": "",
    "nccl/include/nccl.h": "",
    "nccl/lib/libnccl.so.2": "",
}
TOOLKIT13 = {
    "include/cuda_runtime_api.h": "#define CUDART_VERSION  13000\n",
    "include/crt/host_defines.h": "",
    "include/nv/target": "",
    "lib64/libcudart.so.13": "",
}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a machine without a CUDA toolkit. Returns the folder of wheels, which does not exist yet."""
    monkeypatch.setattr(cuda, "TOOLKIT", tmp_path / "toolkit")
    monkeypatch.setattr(cuda, "SYSTEM", tmp_path / "usr")
    monkeypatch.setenv("PATH", "")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: spec)
    return tmp_path / "nvidia"


@pytest.mark.parametrize(
    ("toolkit", "found", "major"),
    [({}, CUDA12, 12), ({}, CUDA13, 13), ({}, CUDA12 | CUDA13, 13), (TOOLKIT13, CUDA12, 12), (TOOLKIT13, CUDA12 | CUDA13, 13)],
    ids=["cuda12", "cuda13", "both", "incomplete toolkit", "incomplete toolkit and both"],
)
def test_all_cuda_wheels_have_one_version(wheels: Path, tmp_path: Path, toolkit: dict[str, str], found: dict[str, str], major: int) -> None:
    write_files(tmp_path / "toolkit", toolkit)
    write_files(wheels, found)
    cuda_found = cuda.find_cuda()
    assert (cuda_found.major, cuda_found.missing) == (major, ())
    of_version = {wheels / path for path in (CUDA12 if major == 12 else CUDA13)}
    if major == 13:
        of_version |= {tmp_path / "toolkit" / path for path in TOOLKIT13}
    assert {part.path for part in (*cuda_found.headers, *cuda_found.libraries, cuda_found.nvrtc)} <= of_version


@pytest.mark.parametrize(("extra", "layout"), [("cuda12", CUDA12), ("cuda13", CUDA13)])
def test_an_extra_names_the_packages_of_all_parts(wheels: Path, extra: str, layout: dict[str, str]) -> None:
    """On a machine that has only the header of the runtime, find_cuda names exactly the packages of the extra, except CuPy."""
    header = next(path for path in layout if path.endswith("cuda_runtime_api.h"))
    write_files(wheels, {header: layout[header]})
    found = cuda.find_cuda()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    packages = {re.split("[><=]", requirement)[0] for requirement in project["optional-dependencies"][extra]} - {f"cupy-{extra}x"}
    assert packages == {part.package for part in (*found.headers, *found.libraries, found.nvrtc, found.nvtx)}
