/* Placeholder until the planner lands here (overwrite this file): equal pieces, no balancing. */
#include "../internal.h"

kbmla_status kbmla_cpu_plan(const kbmla_config *config, const kbmla_sizes *sizes,
                            const kbmla_plan_args *args, struct CUstream_st *stream,
                            kbmla_error *err) {
    (void)stream;
    (void)err;
    int32_t tail = sizes->list_len - config->max_requests, used = 0, slot = 0;
    int32_t share = args->num_requests > 0 ? sizes->max_extra / (args->num_requests * sizes->num_q_tiles) : 0;
    for (int32_t i = 0; i < sizes->list_len; i++)
        args->work[i] = -1;
    for (int32_t b = 0; b < args->num_requests; b++) {
        int32_t tiles = kbmla_num_tiles(args->lengths[b]);
        int32_t count = kbmla_normalise_count(tiles, kbmla_min(1 + share, kbmla_min(config->num_clusters, kbmla_max(1, args->lengths[b] / config->min_split_tokens))));
        args->counts[b] = count;
        for (int32_t s = 0; s < count; s++)
            for (int32_t t = 0; t < sizes->num_q_tiles; t++)
                args->work[used++] = kbmla_pack_entry(t, b, s, args->num_requests);
        if (count > 1) {
            args->work[tail + b] = ~slot;
            slot += count * sizes->num_q_tiles;
        }
    }
    return KBMLA_OK;
}
