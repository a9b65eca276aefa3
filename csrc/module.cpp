// The extension module `_core`: this file only lists what exists.
#include "compat.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

void register_kv_state(py::module_ & m);
void register_host_buffer(py::module_ & m);
void register_nextn(py::module_ & m);
void register_pulse(py::module_ & m);

PYBIND11_MODULE(_core, m) {
    compat::check_library();
    m.attr("LLAMA_VERSION")    = PYCTL_LLAMA_VERSION;
    m.attr("GGML_VERSION")     = PYCTL_GGML_VERSION;
    m.attr("BINDINGS_VERSION") = PYCTL_BINDINGS_VERSION;
    register_host_buffer(m);
    register_kv_state(m);
    register_nextn(m);
    register_pulse(m);
}
