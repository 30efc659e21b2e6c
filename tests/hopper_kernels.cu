/* hopper_kernels.cu - the kernels that have machine code only for sm_90a, for tests/sass.sh. The others have the same
   code as for sm_90. */

#define MEGATRON_IMPLEMENTATION
#include "ops/attention_hopper_back.cuh"

#define FORWARD(dim, bf16, spans) (const void *)mti_hopper_forward_kernel<dim, bf16, spans>
#define FORWARDS(dim) FORWARD(dim, false, false), FORWARD(dim, true, false), FORWARDS_SPANS(dim)
#define FORWARDS_SPANS(dim) FORWARD(dim, false, true), FORWARD(dim, true, true)
#define BACKWARD(dim)                                                                                                  \
    (const void *)mti_hopper_dq_kernel<dim, false>, (const void *)mti_hopper_dq_kernel<dim, true>,                     \
        (const void *)mti_hopper_dkv_kernel<dim, false>, (const void *)mti_hopper_dkv_kernel<dim, true>
extern const void *const hopper_kernels[]; /* otherwise it is internal, and not used */
const void *const hopper_kernels[] = {(const void *)mti_hopper_probe_kernel,
                                      FORWARDS(64),
                                      FORWARDS(96),
                                      FORWARDS(128),
                                      FORWARDS_SPANS(192),
                                      FORWARDS_SPANS(256),
                                      BACKWARD(64),
                                      BACKWARD(96),
                                      BACKWARD(128)};
