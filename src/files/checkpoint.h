/* ---- checkpoints ------------------------------------------------------------------------------------------------- */

#pragma once
#include "fields.h"
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

/* Flags of a row of an mt_tensor_table. */
typedef enum mt_tensor_flags {
    /* the file has the tensor as [in, out]; parts are then columns of it. No effect on a parameter of one row */
    MT_TENSOR_TRANSPOSED = 1,
    /* an import may lack the tensor: its parameter keeps its value, and import logs a warning. MT_ERR_ARGUMENT: the
       parameter has no value yet; call mt_params_init before. mt_checkpoint_load needs all tensors */
    MT_TENSOR_OPTIONAL = 2,
    /* files may have the whole parameter again under this name, in the layout of its other row, as those of a tied head
       may. Save does not write the tensor. Load and import refuse one with other values (MT_ERR_DATA), and read it when
       the tensor of the other row is missing. part must be 0 in both rows */
    MT_TENSOR_COPY = 4
} mt_tensor_flags;

/* A row of an mt_tensor_table. */
typedef struct mt_tensor_name {
    const char *file;  /* name of the tensor in a file, at most MT_NAME_MAX characters; one '#' may stand for a number
   */
    const char *param; /* name of the parameter, with the same '#'. NULL: load and import ignore the tensor */
    int part;          /* a number that mt_checkpoint_format.part explains; 0: the whole parameter */
    int flags;         /* sum of mt_tensor_flags */
} mt_tensor_name;

/* Load and import also accept this ending in place of the table's, for example "x.gamma" for "x.weight". */
typedef struct mt_tensor_alias {
    const char *ending;     /* in the files, such as "gamma" */
    const char *stands_for; /* in the table, such as "weight" */
} mt_tensor_alias;

/* A table of the names and layouts that parameters have in files of another program. One table serves save, load and
   import. This one is for a program whose layers are called layers.0, layers.1, ...:
       static const mt_tensor_name names[] = {{"net.embed.weight", "embedding.weight", 0, 0},
                                              {"net.h.#.fc.weight", "layers.#.up.weight", 0, MT_TENSOR_TRANSPOSED},
                                              {"net.h.#.q.weight", "layers.#.qk.weight", 1, 0},  // part 1 and
                                              {"net.h.#.k.weight", "layers.#.qk.weight", 2, 0},  // part 2 of qk
                                              {"net.h.#.mask", NULL, 0, 0}};                     // is ignored
       static const mt_tensor_table table = {names, 5, "net.", NULL, 0};
   A parameter may have several rows: each of their tensors has one part of it. A tensor may have several rows: it has
   their parts one below the other, in the order of the table. All parameters of one tensor must be on one pipeline
   stage. A parameter without a row has its own name in the file. A row whose parameter the registry does not have is
   not used. */
typedef struct mt_tensor_table {
    const mt_tensor_name *names; /* [count] */
    int count;
    /* a beginning of names in `names`, such as "net.". Load and import also read files in which no name has it. Rows
       that do not begin with it, such as "lm_head.weight", keep their names. NULL: none */
    const char *prefix;
    const mt_tensor_alias *aliases; /* [alias_count] */
    int alias_count;
} mt_tensor_table;

/* A part of a parameter: of every `unit` rows, the `rows` rows from row `first` on. For example, unit 8, first 2 and
   rows 3 are the rows 2, 3, 4, 10, 11, 12, 18, ... A parameter of one row, such as a bias, counts as one row for each
   element. All parts of a parameter have the same unit, and together they have all its rows, once.
   With zip, the rows of the part have another order in the file. They are divided into groups of zip_unit rows. The
   first |zip| rows of a group are two halves in the parameter and pairs in the file: rows i and i + zip / 2 of the
   parameter are rows 2 i and 2 i + 1 of the file. The other rows keep their places. A negative zip is the reverse:
   pairs in the parameter, halves in the file. */
typedef struct mt_tensor_part {
    int64_t unit, first, rows; /* rows 0: the row of the table is not used for this parameter */
    int64_t zip_unit, zip;     /* zip must be even; 0: the same order */
} mt_tensor_part;

/* A format describes the model of a checkpoint. megatron.h has one for its GPT (mt_gpt_checkpoint_create). Every
   function is optional (NULL), and none may communicate. Their argument `model` is mt_checkpoint_desc.model. */
typedef struct mt_checkpoint_format {
    /* Adds metadata. Called with index 0, 1, ...: returns the name of that entry and writes its value. Returns NULL
       when there are no more entries. */
    const char *(*metadata)(const void *model, int index, char value[MT_FIELD_TEXT_MAX]);
    /* Writes the text of config.json to text, and returns its length, as snprintf does; 0: no file. given is the
       config.json that load or import has read last, or NULL; keep its members that the format does not know. bytes is
       4096 more than the length of given. */
    int (*config)(const void *model, const char *given, char *text, size_t bytes);
    /* Returns an error when the files in the directory are not of this model. load and import call it before they read
       tensors. */
    mt_status (*check)(mt_context *ctx, const void *model, const char *directory, const mt_safetensors_set *files);
    /* Explains a number `part` of the table, which is not 0: writes to *out what part of the parameter it is. On entry
       *out is zero; leave it so when the parameter has no such part, and the row is not used. Without this function
       every part must be 0 (MT_ERR_ARGUMENT). */
    void (*part)(const void *model, const mt_param *param, int part, mt_tensor_part *out);
} mt_checkpoint_format;

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
