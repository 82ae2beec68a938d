"""The build, as far as it goes without compiling: what CMake says where a tool is missing, and in a path with blanks.

.ci/run has the rest: a build without a toolkit, one with it, and the tests of an installed package.
"""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NO_TOOLKIT = ("-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY")


@pytest.fixture
def configure(tmp_path):
    """`configure("auto", *arguments)`: status and output of CMake on a copy of the build files; nothing is on PATH."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    source = tmp_path / "a path with blanks"
    source.mkdir()
    shutil.copy(ROOT / "CMakeLists.txt", source)
    shutil.copytree(ROOT / "cmake", source / "cmake")
    generators = {"ninja": "Ninja", "make": "Unix Makefiles"}
    tool = next(filter(shutil.which, generators), None)
    if tool is None:
        pytest.skip("needs cmake and ninja or make")
    program = f"-DCMAKE_MAKE_PROGRAM={shutil.which(tool)}"

    def run(mode: str, *arguments: str):
        where = ["-S", source, "-B", source / f"build {mode}"]
        done = subprocess.run(
            [cmake, *where, "-G", generators[tool], program, f"-DJAX_EP_CUDA={mode}", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_without_a_toolkit_it_is_pure_jax(configure, mode):
    """B64: neither a compiler nor nvcc is needed, and the output says what was built."""
    status, text = configure(mode, *NO_TOOLKIT)
    assert status == 0 and f"no CUDA extension (JAX_EP_CUDA={mode}); the pure-JAX implementation is complete" in text


def test_a_missing_tool_is_named(configure):
    """B64: the extension was asked for: what is missing, and how to say where it is."""
    status, text = configure("on", *NO_TOOLKIT)
    assert status != 0
    assert "JAX_EP_CUDA=on, but nvcc was not found" in text and "-DCUDAToolkit_ROOT=DIR" in text
    status, text = configure("maybe")
    assert status != 0 and "JAX_EP_CUDA is 'maybe'; expected auto, on or off" in text


@pytest.mark.parametrize(
    ("version", "has_library", "expected"),
    [
        ((3, 4, 5), False, "has no lib/libnvshmem_device.a; give another folder as JAX_EP_NVSHMEM_DIR"),
        (
            (3, 3, 20),
            True,
            "is 3.3.20, expected at least 3.4.5 and less than 4: pip install nvidia-nvshmem-cu13==3.4.5",
        ),
        ((4, 0, 0), True, "is 4.0.0, expected at least 3.4.5 and less than 4"),
        (None, True, "no NVSHMEM (pip install nvidia-nvshmem-cu13==3.4.5, or -DJAX_EP_NVSHMEM_DIR)"),
    ],
)
def test_nvshmem_that_cannot_be_built_against_is_named(tmp_path, version, has_library, expected):
    """Missing altogether it is left out; what is there and does not do is an error."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    files = ["include/nvshmem.h", "lib/libnvshmem_host.so.3", *["lib/libnvshmem_device.a"][: int(has_library)]]
    for name in (*files, "include/non_abi/nvshmem_version.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version or (), strict=False)
    text = "".join(f"#define NVSHMEM_VENDOR_{part}_VERSION {number}\n" for part, number in numbers)
    (tmp_path / "include/non_abi/nvshmem_version.h").write_text(text)
    where = f"-DJAX_EP_NVSHMEM_DIR={tmp_path}" if version else f"-DPython_EXECUTABLE={shutil.which('true')}"
    command = [cmake, where, "-DCUDAToolkit_VERSION_MAJOR=13", "-P", ROOT / "cmake" / "Nvshmem.cmake"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (version is None)
    assert expected in " ".join((done.stdout + done.stderr).split())
