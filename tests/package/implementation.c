#define MEGATRON_IMPLEMENTATION
#include <megatron.h>
