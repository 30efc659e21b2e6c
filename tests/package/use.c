/* Two ranks sum a vector. The implementation of megatron.h is in another file of the program. C99 and C++11. */
#include <megatron.h>
#include <stdio.h>
#include <string.h>

static mt_status rank_main(mt_comm *world, void *user) {
    float x[4] = {1, 2, 3, 4};
    float *sums = (float *)user;
    mt_context *ctx;
    mt_status status;
    MT_TRY(mt_context_create(world, NULL, &ctx));
    status = mt_all_reduce(ctx, world, x, x, 4, MT_F32, MT_SUM);
    sums[mt_comm_rank(world)] = x[3];
    mt_context_destroy(ctx);
    return status;
}

int main(void) {
    float sums[2] = {0, 0};
    mt_launch_desc desc;
    mt_status status;
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    status = mt_launch(&desc, rank_main, sums);
    printf("megatron %s, GEMM %s: %s, sums %g %g\n", MT_VERSION, mt_gemm_library(), mt_status_name(status),
           (double)sums[0], (double)sums[1]);
    return status == MT_SUCCESS && sums[0] > 7.5f && sums[0] < 8.5f && sums[1] > 7.5f && sums[1] < 8.5f ? 0 : 1;
}
