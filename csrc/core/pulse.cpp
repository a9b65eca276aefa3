// Registers Pulse, which llama.cpp calls between the nodes of a graph. It counts, and ends the evaluation when told to;
// no interpreter takes part, so it costs nothing compared to a node.
#include "library/context.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

namespace py = pybind11;

namespace {

// The result of llama_decode when it was aborted.
constexpr int aborted = 2;

class pulse {
public:
    void attach(uintptr_t ctx) { llama_set_abort_callback(reinterpret_cast<llama_context *>(ctx), beat, this); }

    // Devices have no callback between two nodes. The scheduler does, if it has a callback, and waits for the device then: it
    // gets one only while evaluations may end early, and waits after attention, so a few times in a batch.
    void watch(uintptr_t ctx) {
        watched = reinterpret_cast<llama_context *>(ctx);
        is_cut  = false;
    }

    void allow(bool is_so) {
        if (watched != nullptr && is_so != allowed) {
            library::on_node(watched, is_so ? look : nullptr, is_so ? this : nullptr);
        }
        is_cut = false;
        allowed.store(is_so, std::memory_order_relaxed);
    }

    void stop() { stopped.store(true, std::memory_order_relaxed); }
    void ask(bool for_it) { asked.store(for_it, std::memory_order_relaxed); }

    bool     is_watching() const { return watched != nullptr; }
    uint64_t count() const { return beats.load(std::memory_order_relaxed); }
    bool     is_stopped() const { return stopped.load(std::memory_order_relaxed); }

    // The scheduler calls it a success.
    int code() const { return is_cut ? aborted : 0; }

private:
    bool is_to_end() const {
        return is_stopped() || (asked.load(std::memory_order_relaxed) && allowed.load(std::memory_order_relaxed));
    }

    static bool beat(void * data) {
        auto & self = *static_cast<pulse *>(data);
        self.beats.fetch_add(1, std::memory_order_relaxed);
        return self.is_to_end();
    }

    static bool look(ggml_tensor * node, bool asks, void * data) {
        auto & self = *static_cast<pulse *>(data);
        if (asks) {
            return node->op == GGML_OP_FLASH_ATTN_EXT;
        }
        self.is_cut = self.is_cut || beat(data);
        return !self.is_cut;
    }

    llama_context *       watched = nullptr;
    bool                  is_cut  = false;  // by `look`, in the thread that evaluates
    std::atomic<uint64_t> beats{ 0 };
    std::atomic<bool>     stopped{ false };
    std::atomic<bool>     asked{ false };
    std::atomic<bool>     allowed{ false };
};

}  // namespace

void register_pulse(py::module_ & m) {
    py::class_<pulse>(m, "Pulse")
        .def(py::init<>())
        .def("attach", &pulse::attach, py::arg("ctx"))
        .def("watch", &pulse::watch, py::arg("ctx"))
        .def("stop", &pulse::stop)
        .def("ask", &pulse::ask, py::arg("for_it") = true)
        .def("allow", &pulse::allow, py::arg("is_so"))
        .def_property_readonly("is_watching", &pulse::is_watching)
        .def_property_readonly("code", &pulse::code)
        .def_property_readonly("count", &pulse::count)
        .def_property_readonly("is_stopped", &pulse::is_stopped);
}
