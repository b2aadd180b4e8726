"""Each library that Triton builds has a module of its own."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from triton.runtime import build

from preheat.backends.cuda.device import launch, launchers

SOURCE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___launcher(void) { return PyModule_Create(&module); }
"""

COMPILES = shutil.which("cc") and Path(sysconfig.get_paths()["include"], "Python.h").exists()


@pytest.fixture
def libraries(tmp_path):
    """Return the paths of two libraries of one name, of the form of Triton's launchers."""
    if not COMPILES:
        pytest.skip("needs a C compiler and Python's headers")
    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "source.c").write_text(SOURCE % number)
        paths.append(str(folder / f"__launcher{sysconfig.get_config_var('EXT_SUFFIX')}"))
        headers = sysconfig.get_paths()["include"]
        subprocess.run(["cc", "-shared", "-fPIC", f"-I{headers}", folder / "source.c", "-o", paths[-1]], check=True)
    return paths


def together(load, paths):
    """Return the answers of two modules that threads load, the first one again before the second is asked."""
    first = load("__launcher", paths[0])
    second = load("__launcher", paths[1])
    again = load("__launcher", paths[0])
    return [first.answer(), second.answer(), again.answer()]


def test_a_library_that_is_loaded_again_changes_no_other(libraries):
    assert launch.overlap, "importing it has Triton load libraries this way"
    assert build._load_module_from_path is launchers.load
    assert together(launchers.load, libraries) == [1, 2, 1]


def test_under_one_name_it_does(libraries):
    """Control: Triton loads all libraries under one name."""

    def load(name, path):
        spec = launchers.spec_from_file_location(name, path)
        module = launchers.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    assert together(load, libraries) == [1, 1, 1]
