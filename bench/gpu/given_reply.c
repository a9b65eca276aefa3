/* Loaded before llama-server (LD_PRELOAD), makes it reply with given tokens: the likeliest token behind position p is
   that of a text at p + 1. The file GIVEN_TOKENS holds texts of 32-bit numbers, each behind its length; no two have a
   number in common, so the token at p says which one it is of. A head drafts the given token with the chance
   GIVEN_SHARE, drawn by position. Whatever else a server does for a token, it does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCHES = 8, TOKENS = 65536, CANDIDATES = 1024, GIVEN = 1 << 20 };

static struct { void *batch, *context; int32_t at[TOKENS], id[TOKENS]; } batches[BATCHES];
static int n_batches;
static void *target; /* the context that evaluates first; all others belong to heads */
static int32_t given[GIVEN], n_given;
static int32_t text_of[GIVEN]; /* by token: where its text begins in `given`, behind its length; 0 for none */
static double share;

#define NEXT(name) ((__typeof__(&name))next(#name))

static void *next(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) { fprintf(stderr, "given_reply: no %s\n", name); abort(); }
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("GIVEN_TOKENS"), *chance = getenv("GIVEN_SHARE");
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file) return;
    n_given = (int32_t)fread(given, sizeof *given, sizeof given / sizeof *given, file);
    fclose(file);
    for (int32_t first = 1; first < n_given; first += given[first - 1] + 1)
        for (int32_t i = 0; i < given[first - 1]; ++i) text_of[given[first + i]] = first;
    share = chance ? atof(chance) : 0.0;
}

static int slot_of(const void *batch) {
    for (int i = 0; i < n_batches; ++i)
        if (batches[i].batch == batch) return i;
    if (n_batches == BATCHES) { fprintf(stderr, "given_reply: more than %d batches\n", BATCHES); abort(); }
    batches[n_batches].batch = (void *)batch;
    return n_batches++;
}

int32_t llama_batch_ext_add_token(void *batch, int32_t sequence, int32_t id) {
    const int32_t index = NEXT(llama_batch_ext_add_token)(batch, sequence, id);
    if (index >= 0 && index < TOKENS) batches[slot_of(batch)].id[index] = id;
    return index;
}

bool llama_batch_ext_set_pos(void *batch, int32_t index, const int32_t *pos) {
    if (index >= 0 && index < TOKENS) batches[slot_of(batch)].at[index] = *pos;
    return NEXT(llama_batch_ext_set_pos)(batch, index, pos);
}

int32_t llama_process(void *context, int type, void *batch) {
    if (!target) target = context;
    for (int i = 0; i < n_batches; ++i) /* a context may have had another batch before */
        if (batches[i].context == context) batches[i].context = NULL;
    batches[slot_of(batch)].context = context;
    return NEXT(llama_process)(context, type, batch);
}

/* The given token behind output `index` of the last evaluation, or -1. */
static int32_t given_at(const void *context, int32_t index) {
    for (int i = 0; i < n_batches; ++i) {
        if (batches[i].context != context || index < 0 || index >= TOKENS) continue;
        const int32_t p = batches[i].at[index] + 1, id = batches[i].id[index];
        const int32_t first = id >= 0 && id < GIVEN ? text_of[id] : 0;
        if (!first || p >= given[first - 1]) return -1;
        const uint32_t drawn = (uint32_t)p * 2654435761u;
        return context == target || (drawn ^ drawn >> 15) % 10007u < share * 10007 ? given[first + p] : -1;
    }
    return -1;
}

float *llama_get_logits_ith(void *context, int32_t index) {
    float *logits = NEXT(llama_get_logits_ith)(context, index);
    const int32_t token = given_at(context, index);
    if (logits && token >= 0) logits[token] = 1e9f;
    return logits;
}

float *llama_get_sampled_logits_ith(void *, int32_t);
uint32_t llama_get_sampled_candidates_count_ith(void *, int32_t);

int32_t *llama_get_sampled_candidates_ith(void *context, int32_t index) {
    static int32_t changed[CANDIDATES];
    int32_t *ids = NEXT(llama_get_sampled_candidates_ith)(context, index);
    float *logits = llama_get_sampled_logits_ith(context, index);
    const uint32_t n = llama_get_sampled_candidates_count_ith(context, index);
    const int32_t token = given_at(context, index);
    if (!ids || !logits || !n || n > CANDIDATES || token < 0) return ids;
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; ++i)
        if (logits[i] > logits[best]) best = i;
    memcpy(changed, ids, n * sizeof *ids);
    changed[best] = token;
    logits[best] = 1e9f; /* several may be the largest, and a sampler takes any of these */
    return changed;
}
