/* ---- pipeline: stages, several micro-batches in flight ----------------------------------------------------------- */

#pragma once
#include "grid.h"

/* A schedule is the list of actions of one stage in one step. mt_pipeline_schedule makes it, or you write it yourself.
   mt_pipeline_run runs it. The schedules below run the micro-batches in ascending order, both forward and backward.
   Their names are Megatron's (core/pipeline_parallel/schedules.py).
     1F1B           PipeDream-flush (arXiv 2104.04473, section 2.2.1). A stage first runs one forward for each stage
                    after it, then one forward and one backward in turn. On stage number `stage` (from 0), at most
                    min(stages - stage, micro_batches) micro-batches are in flight
     GPIPE          all forwards, then all backwards (arXiv 1811.06965). All micro-batches are in flight
     FORWARD_ONLY   for evaluation
   With equal stages, 1F1B and GPIPE take the same time, that of micro_batches + stages - 1 forwards and backwards. The
   bubble is (stages - 1) / micro_batches of the ideal time. */
typedef enum mt_schedule { MT_SCHEDULE_1F1B = 0, MT_SCHEDULE_GPIPE = 1, MT_SCHEDULE_FORWARD_ONLY = 2 } mt_schedule;

/* After a forward, a stage sends its output to the next stage. After a backward, it sends its input gradient to the
   previous stage. The last two kinds send and receive in one call. They are for two neighbours that both send at the
   same time: with separate calls each would wait for the other. */
typedef enum mt_action_kind {
    MT_FORWARD = 0,
    MT_BACKWARD = 1,
    MT_SEND_FORWARD = 2,
    MT_RECV_FORWARD = 3,
    MT_SEND_BACKWARD = 4,
    MT_RECV_BACKWARD = 5,
    MT_SEND_FORWARD_RECV_BACKWARD = 6,
    MT_SEND_BACKWARD_RECV_FORWARD = 7
} mt_action_kind;

/* A slot holds what one micro-batch in flight keeps: its input and its activations. A micro-batch occupies its slot
   from the time when its input is received until its backward is done. */
typedef struct mt_action {
    int micro_batch, slot;           /* what the action computes or sends; in MT_RECV_...: what it receives */
    int recv_micro_batch, recv_slot; /* what the last two kinds receive; otherwise equal to micro_batch, slot */
    mt_action_kind kind;
} mt_action;

/* Writes the actions of stage number `stage` (from 0), at most 6 for each micro-batch, and their number to *count.
   capacity is the number of entries in actions. actions NULL: writes only the number. No communication.
   MT_ERR_ARGUMENT: schedule, stages, stage or micro_batches is out of range. MT_ERR_SHAPE: there are more than
   `capacity` actions. */
MT_API mt_status mt_pipeline_schedule(mt_schedule schedule, int stages, int stage, int micro_batches,
                                      mt_action *actions, int capacity, int *count);

/* Returns the number of slots that the actions use. */
MT_API int mt_pipeline_slots(const mt_action *actions, int count);

/* The functions that mt_pipeline_run calls for a stage. forward computes output from input, which is the output of the
   previous stage. backward computes dinput from doutput, which is the gradient of this stage's output. The pointer
   backward may be NULL when no action is MT_BACKWARD. On the first stage input and dinput are mt_none(). On the last
   stage output and doutput are mt_none(). mt_pipeline_run owns the memory of these four tensors. input stays valid
   until the backward of its micro-batch is done; the others are valid only during the call. */
typedef struct mt_pipeline_stage {
    int64_t rows, cols; /* of the four tensors: [tokens, hidden]; with sequence parallelism [tokens / t, hidden] */
    mt_dtype dtype;     /* of the four tensors: mt_params_dtype */
    mt_status (*forward)(mt_context *ctx, void *user, const mt_action *action, mt_tensor input, mt_tensor output);
    mt_status (*backward)(mt_context *ctx, void *user, const mt_action *action, mt_tensor doutput, mt_tensor dinput);
    void *user; /* passed to both functions */
} mt_pipeline_stage;

/* Runs the actions of this rank's stage. Every rank of the pipeline group calls it with the actions of its own stage.
   What a forward leaves in the arena stays there until the backward of its micro-batch is done. Every forward must
   allocate what the first one did, in the same order. On return the arena is as before the call. docs/many-ranks.md
   says how large the arena must be, and gives the rules for a list of actions that you write yourself.
   Communication: for each micro-batch, one send of [rows, cols] to the next stage after the forward, and one to the
   previous stage after the backward. The ledger of grid->pp counts them. In check mode, what is sent must be replicated
   or split by rows over the tensor group.
   MT_ERR_ARGUMENT: an action breaks a rule. The message has the action's number, and no action has run. MT_ERR_SHAPE:
   a forward leaves more in the arena than the first one. When one stage returns an error, the others wait until that
   rank destroys its communicators or the timeout passes. */
MT_API mt_status mt_pipeline_run(mt_context *ctx, const mt_grid *grid, const mt_pipeline_stage *stage,
                                 const mt_action *actions, int count);
