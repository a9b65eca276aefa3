// The extension module `_core`: the list of its classes and functions.
#include "device/transfer.h"
#include "library/breakdown.h"
#include "library/context.h"
#include "library/weights.h"
#include "module.h"

#include <pybind11/stl.h>

namespace py = pybind11;

void register_kv_state(py::module_ & m);
void register_host_buffer(py::module_ & m);
void register_pulse(py::module_ & m);

void check_module(const char * build) {
    const auto text = [](const std::string & version, size_t n_bytes, size_t n_seqs) {
        return "ggml " + version + ", tensors of " + std::to_string(n_bytes) + " bytes, " + std::to_string(n_seqs) + " sequences";
    };
    constexpr size_t  object = 32;  // ggml's own header of a tensor
    const std::string built  = text(PYCTL_GGML_VERSION, sizeof(ggml_tensor) + object, library::n_sequences);
    const std::string loaded = text(ggml_version(), ggml_tensor_overhead(), llama_max_parallel_sequences());
    if (built != loaded) {
        throw std::runtime_error("pyctl's extension was built for " + built + ", but " + loaded + " is loaded");
    }
    if (std::string(build) != PYCTL_BUILD) {
        throw std::runtime_error("it was built with another _core than the one that is loaded: reinstall pyctl");
    }
}

PYBIND11_MODULE(_core, m) {
    check_module(PYCTL_BUILD);
    m.attr("LLAMA_VERSION")    = PYCTL_LLAMA_VERSION;
    m.attr("GGML_VERSION")     = PYCTL_GGML_VERSION;
    m.attr("BINDINGS_VERSION") = PYCTL_BINDINGS_VERSION;
    m.attr("MAX_STAGE_BYTES")  = max_stage;
    m.def("breakdown", [](uintptr_t ctx) { return library::breakdown(reinterpret_cast<llama_context *>(ctx)); }, py::arg("ctx"));
    m.def("row_places", [](uintptr_t ctx) { return library::row_places(reinterpret_cast<llama_context *>(ctx)); }, py::arg("ctx"));
    m.def("layer_devices", [](uintptr_t model) { return library::layer_devices(reinterpret_cast<llama_model *>(model)); }, py::arg("model"));
    m.def("release_copied", [](uintptr_t model) { return library::release_copied(reinterpret_cast<llama_model *>(model)); }, py::arg("model"));
    register_host_buffer(m);
    register_kv_state(m);
    register_pulse(m);
}
