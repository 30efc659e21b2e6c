/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

#pragma once
#include "../parallel/optimizer.h"

/* Saves and loads the parameters of a registry, the state of its optimizer, and the training state of a loop:
       mt_checkpoint *c;        mt_checkpoint_desc d = {.directory = "runs/a", .optimizer = &adam};
                                MT_TRY(mt_checkpoint_create(ctx, params, &d, &c));
       mt_training_state s = {.step = 100};            // the same on every rank
                                MT_TRY(mt_checkpoint_save(ctx, c, &s));        // runs/a/step-00000100
                                MT_TRY(mt_checkpoint_load(ctx, c, 100, &s));   // in another run, on any grid

   A checkpoint is a directory on a file system that all ranks see: DIRECTORY/step-00000100. Its tensors are whole, not
   sharded, and load on any tensor x data x pipeline grid. With one pipeline stage its files are:
     model.safetensors      the parameters in the registry's type; training state and fields are in its __metadata__
     optimizer.safetensors  for each parameter P: P.exp_avg, P.exp_avg_sq and, if it has a master, P.master, all F32
     config.json            if the format writes one (mt_checkpoint_format.config)
     generation_config.json beside config.json, if load or import has read one: a JSON object of at most 1 MiB.
                            What is read through a link named step-N is not copied
   With 4 stages, model.safetensors becomes model-00001-of-00004.safetensors, ..., and model.safetensors.index.json, as
   Hugging Face shards a model; the same holds for the optimizer. A parameter that the first and the last stage share is
   in the first stage's file.

   The model's files have the registry's names, shapes and layouts, unless mt_checkpoint_desc.table has others. With a
   table, load and import also read files with the names of the registry. The optimizer's files always have the
   registry's names and layouts.

   Versions: each file has the version of the library that wrote it. The library reads files of its own version and of
   older ones. A file of a newer version, even a newer patch, is MT_ERR_DATA with a message that has both versions.
   mt_checkpoint_load refuses files without a version; mt_checkpoint_import reads them, because other programs write
   such files.

   Safety: a save writes to DIRECTORY/.step-00000100.tmp, synchronises every file and directory with the disk, and then
   renames the directory. If the run is killed at any moment, the older checkpoints are intact, and the new one is
   either complete or not there. Each file has a checksum of all its bytes.

   Locking: only one run at a time can write to a directory. A checkpoint locks the file DIRECTORY/.lock (flock) at its
   first save, or in mt_checkpoint_lock, and holds the lock until mt_checkpoint_destroy or the end of the process. On a
   file system without locks nothing is locked. */
typedef struct mt_checkpoint mt_checkpoint; /* opaque */

#define MT_PATH_MAX 1024 /* characters of a path DIRECTORY/NAME with its NUL; a longer path is MT_ERR_ARGUMENT */

/* The type of mt_field.value. */
typedef enum mt_field_kind {
    MT_FIELD_I64 = 0,  /* int64_t */
    MT_FIELD_U64 = 1,  /* uint64_t */
    MT_FIELD_INT = 2,  /* int */
    MT_FIELD_F32 = 3,  /* float, finite */
    MT_FIELD_F64 = 4,  /* double, finite */
    MT_FIELD_BOOL = 5, /* int: 0 or 1 */
    MT_FIELD_TEXT = 6  /* char[bytes], UTF-8, ends with a NUL */
} mt_field_kind;

/* A variable of the caller that is written to a file or read from one. When kind, low and high are 0, it is an int64_t
   of any value. mt_checkpoint_save and the functions that read fields refuse a float or double that is not finite. */
typedef struct mt_field {
    const char *name;
    mt_field_kind kind;
    void *value;
    int64_t low, high; /* MT_FIELD_I64, MT_FIELD_INT: smallest and largest value that is accepted; both 0: any */
    size_t bytes;      /* MT_FIELD_TEXT: the size of the array */
    int must_match;    /* checkpoints only. 1: load refuses a file with another value; 0: load reads the value */
    int nullable;      /* JSON only. 1: null leaves the value as it is; 0: null is MT_ERR_DATA */
} mt_field;

/* A table has the names and layouts of parameters in files of another program. A format describes the model of a
   checkpoint. The chapter "tables and formats of checkpoints" has the fields of both. */
typedef struct mt_tensor_table mt_tensor_table;
typedef struct mt_checkpoint_format mt_checkpoint_format;

typedef struct mt_checkpoint_desc {
    /* directory of the run's checkpoints; save creates it, but not its parent; the string is copied. NULL: the
       checkpoint can only import */
    const char *directory;
    mt_optimizer *optimizer; /* must outlive the checkpoint; NULL: parameters only */
    int keep;                /* save keeps so many of the newest checkpoints, and removes the others; 0: 2 */
    /* advanced */
    /* variables of the program that are saved and loaded with the parameters. The array is copied, but its names and
       values must outlive the checkpoint */
    const mt_field *fields;
    int field_count;
    const mt_tensor_table *table;       /* must outlive the checkpoint; NULL: the registry's names and layouts */
    const mt_checkpoint_format *format; /* is copied; NULL: none */
    const void *model;                  /* passed to the format's functions; MT_ERR_ARGUMENT without a format */
} mt_checkpoint_desc;

#define MT_NOTE_MAX 1024

/* What a loop needs to resume, in addition to parameters and optimizer. The library uses only step; it stores the other
   fields and gives them back. */
typedef struct mt_training_state {
    int64_t step;           /* steps done, at most 2^48; names the checkpoint */
    uint64_t seed;          /* of weights, batches and dropout */
    int64_t position;       /* in the data, in a unit that the loop chooses, at most 2^62 */
    mt_loss_scaler scaler;  /* all zeros without a scaler */
    char note[MT_NOTE_MAX]; /* a text that the loop chooses, such as its flags; UTF-8 */
} mt_training_state;

/* Creates a checkpoint; opens and writes no file. Allocates host memory for the largest unsharded parameter in f32
   (twice with a table that changes layouts), and 1 KiB of device memory. params must have all its parameters, and
   outlive the checkpoint. Load and import allocate parameters that have no memory yet, as mt_params_init does; an
   import that lacks tensors (MT_TENSOR_OPTIONAL) and a save need mt_params_init or one of them before. Not collective.
   MT_ERR_ARGUMENT: the registry has no parameters; a value of desc is out of range (the limit of directory is
   MT_PATH_MAX - 128 characters); the optimizer is of another registry; a field has no name or no value, or its name is
   already used by another field or by the library's metadata; a row breaks a rule of mt_tensor_table, the parts of a
   parameter do not have each of its rows once, or the parts of a tensor have different widths. */
MT_API mt_status mt_checkpoint_create(mt_context *ctx, mt_params *params, const mt_checkpoint_desc *desc,
                                      mt_checkpoint **out);
MT_API void mt_checkpoint_destroy(mt_context *ctx, mt_checkpoint *checkpoint); /* NULL is allowed */

/* Creates the directory if it is missing, locks it and tries to write to it. The first save does the same; call this
   function to get an error before the training begins. It is collective over the grid's world, and so are save, load
   and import: when one rank fails, every rank returns the same status and message. MT_ERR_IO: the directory cannot be
   written, or another run (or another mt_checkpoint of this run) holds the lock. MT_ERR_UNSUPPORTED: this process was
   forked from the one that holds the lock; save returns it, too. */
MT_API mt_status mt_checkpoint_lock(mt_context *ctx, mt_checkpoint *checkpoint);

/* Saves a checkpoint of step state->step. Collective over the grid's world, as load and import are. The ranks compare
   state, fields and the optimizer's step: when they differ, every rank returns MT_ERR_MISMATCH, whose message has both
   values and their ranks, and nothing is written. Removes the oldest checkpoints, so that desc.keep of them remain, and
   the files that a killed save has left behind. When something cannot be removed, save logs a warning, and the next
   save tries again. A symbolic link is removed, but not its target. On MT_DEVICE_META no file is touched.
   MT_ERR_IO: no space, no permission, a checkpoint of this step or a later one exists, or another run holds the lock.
   MT_ERR_DATA: the note, a text or a name is not UTF-8, or an element of a parameter or of the optimizer's state is
   not finite; the message names the tensor. MT_ERR_ARGUMENT: state, fields or the optimizer's step on some
   rank are not what mt_checkpoint_load accepts, or the last step of a sharded optimizer failed before the data ranks
   had gathered the parameters; mt_checkpoint_load makes them complete. After an error the older checkpoints are still
   there.
   While one rank of each pipeline stage writes, the others wait in a collective. The timeout of the world
   (mt_launch_desc.timeout_s) must exceed the time that a rank takes to write its files.
   The arena needs memory for the largest parameter, unsharded and padded, twice: once in the parameters' type and once
   in f32; with a sharded optimizer, twice in f32. */
MT_API mt_status mt_checkpoint_save(mt_context *ctx, mt_checkpoint *checkpoint, const mt_training_state *state);

/* Loads the checkpoint of a step, which may have been saved on another grid. Collective over the grid's world. Before
   it writes the first parameter, it checks the names, shapes and types (F32, F64, BF16 or F16) of all tensors, their
   values, the checksums, mt_checkpoint_format.check, the training state and the fields. No tensor may be missing, and
   none may be unknown that the table does not ignore. A tensor may have another type than its parameter. Its elements
   must be finite, and stay finite when they are rounded to the parameter's type; so 1e5 is refused for MT_F16. The
   ranks compare what they have read: MT_ERR_MISMATCH when the training state, or the size or checksum of a file,
   differs between them, for example because they load different steps.
   With an optimizer, f32 parameters are then loaded from the masters in the files, if there are any, and masters that
   the files do not have become copies of the loaded parameters.
   MT_ERR_IO, MT_ERR_DATA: the message names the file and the reason. MT_ERR_MEMORY: the arena has no memory for the
   largest shard in f32, which 16-bit parameters and sharded optimizers need. MT_ERR_UNSUPPORTED: on MT_DEVICE_META.
   After an error nothing has changed, with one exception: when the disk fails or another program truncates a file after
   the checks have passed (MT_ERR_IO), some parameters may already have been loaded. */
MT_API mt_status mt_checkpoint_load(mt_context *ctx, mt_checkpoint *checkpoint, int64_t step, mt_training_state *state);

/* Loads only the parameters, and copies them to the masters. Moments and training state stay as they are. directory has
   model.safetensors or its index, from a checkpoint or from another program. Fields with must_match are compared when
   the file has them; the program's variables stay as they are. Collective and errors as for mt_checkpoint_load. */
MT_API mt_status mt_checkpoint_import(mt_context *ctx, mt_checkpoint *checkpoint, const char *directory);

/* Writes the step of the newest checkpoint in the directory to *step, or -1 when there is no checkpoint or no
   directory. With comm it is collective: the first rank looks, and every rank of comm gets its result. comm NULL: not
   collective. */
MT_API mt_status mt_checkpoint_latest(mt_context *ctx, mt_comm *comm, const char *directory, int64_t *step);

/* Writes the path of a checkpoint, DIRECTORY/step-00000100 for step 100, to path, which has `bytes` characters.
   MT_ERR_ARGUMENT: it does not fit with its NUL. */
MT_API mt_status mt_checkpoint_path(mt_context *ctx, const char *directory, int64_t step, char *path, size_t bytes);
