// Attention caches that write and read their state in another order than the library's, as a later release may. A process
// loads this before the library, whose path is in OTHER_LIBRARY. OTHER_ORDER is "values": two more values about the whole
// cache after the number of its layers, as by version 4 of the format; or "rows": one more value before all rows of a layer.
#include "llama-io.h"

#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <string>
#include <vector>

namespace {

constexpr uint32_t extra = 64;

bool is_order(const char * name) {
    return std::string(std::getenv("OTHER_ORDER")) == name;
}

void * function(const char * name) {
    void * library = dlopen(std::getenv("OTHER_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
    return dlsym(library, name);
}

struct other_writer : llama_io_write_i {
    explicit other_writer(llama_io_write_i & to) : to(to) {}

    void write(const void * src, size_t size) override {
        const auto * bytes = static_cast<const uint8_t *>(src);
        waiting.emplace_back(bytes, bytes + size);
        if (is_order("rows") || has_rows) {
            flush();
        }
        if (is_order("rows") && size == sizeof(uint64_t)) {  // the bytes of a row
            to.write(&extra, sizeof(extra));
        }
    }
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        has_rows = true;
        flush();
        to.write_tensor(tensor, offset, size);
    }
    size_t n_bytes() override { return to.n_bytes(); }

    // The type and the bytes of a row stand between what concerns the whole cache and its first rows. A cache may have no
    // layer.
    void flush() {
        const size_t end = is_order("values") && !is_extended ? waiting.size() - (has_rows ? 2 : 0) : SIZE_MAX;
        for (size_t i = 0; i <= waiting.size(); ++i) {
            if (i == end) {
                to.write(&extra, sizeof(extra));
                to.write(&extra, sizeof(extra));
                is_extended = true;
            }
            if (i < waiting.size()) {
                to.write(waiting[i].data(), waiting[i].size());
            }
        }
        waiting.clear();
    }

    llama_io_write_i &                to;
    std::vector<std::vector<uint8_t>> waiting;
    bool                              has_rows    = false;
    bool                              is_extended = false;
};

struct other_reader : llama_io_read_i {
    explicit other_reader(llama_io_read_i & from) : from(from) {}

    void read(void * dst, size_t size) override {
        from.read(dst, size);
        if (is_order("rows") && size == sizeof(uint64_t)) {
            uint32_t dropped;
            from.read(&dropped, sizeof(dropped));
        }
    }
    void   read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override { from.read_tensor(tensor, offset, size); }
    void   discard() override { from.discard(); }
    size_t n_bytes() override { return from.n_bytes(); }

    llama_io_read_i & from;
};

constexpr const char * write_name = "_ZNK14llama_kv_cache11state_writeER16llama_io_write_iij";
constexpr const char * read_name  = "_ZN14llama_kv_cache10state_readER15llama_io_read_iij";

}  // namespace

extern "C" {

void write_other(const void * cache, llama_io_write_i & io, int seq, unsigned flags) asm("_ZNK14llama_kv_cache11state_writeER16llama_io_write_iij");
void read_other(void * cache, llama_io_read_i & io, int seq, unsigned flags) asm("_ZN14llama_kv_cache10state_readER15llama_io_read_iij");

void write_other(const void * cache, llama_io_write_i & io, int seq, unsigned flags) {
    static const auto own = reinterpret_cast<decltype(&write_other)>(function(write_name));
    other_writer      writer(io);
    own(cache, writer, seq, flags);
    writer.flush();
}

void read_other(void * cache, llama_io_read_i & io, int seq, unsigned flags) {
    static const auto own = reinterpret_cast<decltype(&read_other)>(function(read_name));
    other_reader      reader(io);
    own(cache, reader, seq, flags);
}

}
