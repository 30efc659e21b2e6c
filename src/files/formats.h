/* ---- tables and formats of checkpoints, for authors of importers ------------------------------------------------- */

#pragma once
#include "fields.h"

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
struct mt_tensor_table {
    const mt_tensor_name *names; /* [count] */
    int count;
    /* a beginning of names in `names`, such as "net.". Load and import also read files in which no name has it. Rows
       that do not begin with it, such as "lm_head.weight", keep their names. NULL: none */
    const char *prefix;
    const mt_tensor_alias *aliases; /* [alias_count] */
    int alias_count;
};

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
struct mt_checkpoint_format {
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
};
