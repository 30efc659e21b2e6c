/* ---- safetensors files, for authors of importers and file formats ------------------------------------------------ */

#pragma once
#include "../comm/compare.h"

/* A file in the format of github.com/huggingface/safetensors. Opening it reads and checks the header. The data of a
   tensor are read later, when the program uses them. mt_safetensors_open refuses the files that the format's reference
   library refuses, and also files with duplicate keys, NUL characters, or tensors of more than MT_SAFETENSORS_DIMS
   dimensions.
   The file stays open and mapped into memory until mt_safetensors_close, and must not change in that time. When another
   program truncates it, mt_safetensors_read and the functions that load checkpoints return MT_ERR_IO, but a program
   that reads mt_safetensors_tensor.data itself gets SIGBUS, as with any mapping. */
typedef struct mt_safetensors mt_safetensors; /* opaque */

#define MT_SAFETENSORS_DIMS 8

/* A tensor of a file. The struct and its pointers belong to the file: they are valid until mt_safetensors_close. */
typedef struct mt_safetensors_tensor {
    const char *name;  /* UTF-8 */
    const char *dtype; /* as in the file: "F32", "BF16", "I64", ... */
    int dims;
    int64_t shape[MT_SAFETENSORS_DIMS];
    const void *data; /* little-endian, not necessarily aligned */
    int64_t bytes;
    const mt_safetensors *file;
} mt_safetensors_tensor;

/* Opens a file. MT_ERR_IO: it cannot be read. MT_ERR_DATA: it is not a valid safetensors file. The message names the
   file and the reason. */
MT_API mt_status mt_safetensors_open(mt_context *ctx, const char *path, mt_safetensors **out);
MT_API void mt_safetensors_close(mt_safetensors *file); /* NULL is allowed */
MT_API int mt_safetensors_count(const mt_safetensors *file);
MT_API const mt_safetensors_tensor *mt_safetensors_at(const mt_safetensors *file, int index); /* in order of names */
MT_API const mt_safetensors_tensor *mt_safetensors_find(const mt_safetensors *file,
                                                        const char *name); /* NULL: there is none */

/* Returns the value of a key of "__metadata__", or NULL when there is none. The string is valid until
   mt_safetensors_close. */
MT_API const char *mt_safetensors_metadata(const mt_safetensors *file, const char *key);

/* Writes the elements of a tensor of type F32, F64, BF16 or F16 as floats to out, in host memory; F64 is rounded.
   MT_ERR_DTYPE: the tensor is of another type. MT_ERR_DATA: a finite F64 element is too large for a float. MT_ERR_IO:
   the tensor cannot be read, or the file was truncated since it was opened. After the last two errors the content of
   out is undefined. */
MT_API mt_status mt_safetensors_read(mt_context *ctx, const mt_safetensors_tensor *tensor, float *out);

/* Writes `bytes` bytes of a tensor of any type, from byte `at` of its data on, to out, as they are in the file.
   MT_ERR_ARGUMENT: the tensor does not have these bytes. MT_ERR_IO: as for mt_safetensors_read. */
MT_API mt_status mt_safetensors_read_bytes(mt_context *ctx, const mt_safetensors_tensor *tensor, int64_t at,
                                           int64_t bytes, void *out);

/* Writes a file in the same format:
       mt_setting about[] = {{"format", "pt"}, {"step", "100"}};
       int64_t shape[] = {4, 6};
       mt_safetensors_writer *w;  MT_TRY(mt_safetensors_create(ctx, "x.safetensors", about, 2, &w));
                                  MT_TRY(mt_safetensors_add(ctx, w, "weight", "F32", 2, shape));
                                  MT_TRY(mt_safetensors_write(ctx, w, weight, 4 * 6 * sizeof *weight));
                                  MT_TRY(mt_safetensors_finish(ctx, w));
                                  mt_safetensors_destroy(w);
   The header precedes the data, so add every tensor before the first write. The data are written to PATH.tmp; finish
   renames it to PATH. Until finish has succeeded, PATH is as before. The first write creates PATH.tmp and locks it
   (flock): a second writer of the same PATH, also of another process, gets MT_ERR_IO until the first one is finished or
   destroyed. A PATH.tmp that a killed run has left is replaced. The metadata begin with a checksum of the file, as
   those of a checkpoint do. */
typedef struct mt_safetensors_writer mt_safetensors_writer; /* opaque */

/* create:  metadata: `count` names and values, UTF-8; NULL if count is 0. mt_field_text writes a number as text.
   add:     a tensor of a type of the format ("F32", "BF16", "I64", ...), with 0 to MT_SAFETENSORS_DIMS dimensions.
   write:   appends bytes of the tensors, little-endian, in the order of their adds, without gaps. One call may have a
            part of a tensor, or several tensors.
   finish:  synchronises the file with the disk (fsync) and renames it to PATH.
   destroy: frees the writer. Without a finish before, it removes PATH.tmp. NULL is allowed.
   Strings are copied. MT_ERR_ARGUMENT: a type or a shape is not one of the format, a tensor is added after a write,
   or more or fewer bytes were written than the tensors have. MT_ERR_DATA, at the first write or at finish: a name is
   given twice or is not UTF-8. MT_ERR_UNSUPPORTED: the header has more than 100000000 bytes. MT_ERR_IO: the file cannot
   be written, another writer writes it, or PATH is a directory, a pipe, a device or a link to one (also /dev/stdout).
   MT_ERR_UNSUPPORTED: this process was forked from the one that began it. */
MT_API mt_status mt_safetensors_create(mt_context *ctx, const char *path, const mt_setting *metadata, int count,
                                       mt_safetensors_writer **out);
MT_API mt_status mt_safetensors_add(mt_context *ctx, mt_safetensors_writer *writer, const char *name, const char *dtype,
                                    int dims, const int64_t *shape);
MT_API mt_status mt_safetensors_write(mt_context *ctx, mt_safetensors_writer *writer, const void *data, size_t bytes);
MT_API mt_status mt_safetensors_finish(mt_context *ctx, mt_safetensors_writer *writer);
MT_API void mt_safetensors_destroy(mt_safetensors_writer *writer);

/* The open files of one model: DIRECTORY/STEM.safetensors or, when there is no such file, the files that
   DIRECTORY/STEM.safetensors.index.json names, as Hugging Face shards a model. MT_ERR_IO: there is neither the file nor
   the index. MT_ERR_DATA: a tensor is in two files, the index and the files disagree, or a newer version of this
   library wrote a file. DIRECTORY may come from elsewhere, so links in it are not followed, except those to a file
   beside the link and those of Hugging Face's cache (../../blobs/HASH): another one is MT_ERR_IO. mt_safetensors_open
   and DIRECTORY itself follow links. STEM may have at most 40 characters. The pointers that mt_safetensors_set_find and
   mt_safetensors_set_file return are valid until mt_safetensors_set_close. */
typedef struct mt_safetensors_set mt_safetensors_set; /* opaque */

MT_API mt_status mt_safetensors_set_open(mt_context *ctx, const char *directory, const char *stem,
                                         mt_safetensors_set **out);
MT_API void mt_safetensors_set_close(mt_safetensors_set *set);                                  /* NULL is allowed */
MT_API const mt_safetensors *mt_safetensors_set_file(const mt_safetensors_set *set, int index); /* NULL: no such file */
MT_API const mt_safetensors_tensor *mt_safetensors_set_find(const mt_safetensors_set *set,
                                                            const char *name); /* NULL: there is none */
