"""The report about another release of llama.cpp: gone, changed and new declarations."""

from __future__ import annotations

from pathlib import Path

from tools.pin import PINNED, changes, declarations, report

OLD = """
// a comment with llama_gone(
class llama_memory_rows : public llama_memory_i {
public:
    llama_pos first(llama_seq_id id) const;  // inline
    struct slot { int at; };
};
enum llama_kind { LLAMA_A, LLAMA_B };
LLAMA_API int32_t llama_same(struct llama_context * ctx);
LLAMA_API int32_t llama_changed(int32_t n);
LLAMA_API void
    llama_gone(int n);
LLAMA_API void llama_unused(int n);
"""
NEW = """
class llama_memory_rows : public llama_memory_i {
public:
    llama_pos   first(llama_seq_id id)  const;
    struct slot { int at; };
};
class llama_memory_new_rows : public llama_memory_new {};
class llama_memory_new : public llama_memory_i {};
enum llama_kind { LLAMA_A, LLAMA_C };
LLAMA_API int32_t llama_same(struct llama_context * ctx); /* as it was */
LLAMA_API int64_t llama_changed(int32_t n);
"""
USED = "llama_memory_rows llama_kind llama_same llama_changed llama_gone"


def tree(path: Path, header: str) -> Path:
    for name in ("include", "src"):
        (path / name).mkdir(parents=True)
    (path / "include" / "llama.h").write_text("")
    (path / "src" / "llama-memory.h").write_text(header)
    return path


def test_what_is_gone_changed_and_new(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "memory.h").write_text(f'#include "llama.h"\n#include "llama-memory.h"\n// {USED}')
    found = changes(tree(tmp_path / "old", OLD), tree(tmp_path / "new", NEW), csrc)
    assert found.gone == ("llama_gone",)
    assert set(found.changed) == {"llama_changed", "llama_kind"}
    assert "int64_t llama_changed" in found.changed["llama_changed"]
    assert found.same == 2
    assert found.new_memories == ("llama_memory_new", "llama_memory_new_rows")
    assert "5 declarations in use: 2 same, 3 changed or gone" in report(found)
    assert changes(tmp_path / "old", tmp_path / "old", csrc).is_none


def test_the_pinned_headers_declare_what_the_extension_uses() -> None:
    found = changes(PINNED, PINNED)
    assert found.is_none
    assert found.same > 100
    header = (PINNED / "src" / "llama-kv-cache.h").read_text(encoding="utf-8")
    assert "find_slot" in declarations(header)["llama_kv_cache"]
