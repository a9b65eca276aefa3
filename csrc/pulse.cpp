// Registers Pulse: what llama.cpp calls between the nodes of a graph. It counts, and ends the evaluation when told to;
// no interpreter takes part, so it costs nothing beside a node.
#include "llama.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

namespace py = pybind11;

namespace {

class pulse {
public:
    void attach(uintptr_t ctx) { llama_set_abort_callback(reinterpret_cast<llama_context *>(ctx), beat, this); }
    void stop() { stopped.store(true, std::memory_order_relaxed); }
    void ask(bool for_it) { asked.store(for_it, std::memory_order_relaxed); }
    void allow(bool is_so) { allowed.store(is_so, std::memory_order_relaxed); }

    uint64_t count() const { return beats.load(std::memory_order_relaxed); }
    bool     is_stopped() const { return stopped.load(std::memory_order_relaxed); }

private:
    static bool beat(void * data) {
        auto & self = *static_cast<pulse *>(data);
        self.beats.fetch_add(1, std::memory_order_relaxed);
        return self.is_stopped() || (self.asked.load(std::memory_order_relaxed) && self.allowed.load(std::memory_order_relaxed));
    }

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
        .def("stop", &pulse::stop)
        .def("ask", &pulse::ask, py::arg("for_it") = true)
        .def("allow", &pulse::allow, py::arg("is_so"))
        .def_property_readonly("count", &pulse::count)
        .def_property_readonly("is_stopped", &pulse::is_stopped);
}
