# Chooses the GEMM library of programs that include megatron.h. CMakeLists.txt reads this file and, after installation,
# find_package(megatron) does: the choice is made when a program is built, not when the headers are installed.
#
#   MEGATRON_GEMM    auto (oneDNN, else CBLAS, else the built-in loop) | onednn | cblas | builtin
#
# Sets MEGATRON_GEMMS (the libraries that were found, best first) and MEGATRON_GEMM_CHOSEN. megatron_use_gemm applies a
# library to a target. Libraries are linked by path, because imported targets would not be visible to a project that
# adds this one.

set(MEGATRON_GEMM auto CACHE STRING "GEMM library: auto, onednn, cblas or builtin")
set_property(CACHE MEGATRON_GEMM PROPERTY STRINGS auto onednn cblas builtin)

# oneDNN is found by its header and its library. Its own CMake package is not used, because it searches for OpenCL in
# every project. To choose an installation, set CMAKE_PREFIX_PATH, dnnl_ROOT or dnnl_DIR (PREFIX/lib/cmake/dnnl).
set(mt_onednn_hints ${dnnl_ROOT} $ENV{dnnl_ROOT})
if(dnnl_DIR)
    get_filename_component(mt_onednn_prefix "${dnnl_DIR}/../../.." ABSOLUTE)
    list(APPEND mt_onednn_hints ${mt_onednn_prefix})
endif()
find_path(MEGATRON_ONEDNN_INCLUDE dnnl.h HINTS ${mt_onednn_hints} PATH_SUFFIXES include)
find_library(MEGATRON_ONEDNN_LIBRARY dnnl HINTS ${mt_onednn_hints} PATH_SUFFIXES lib lib64)
find_path(MEGATRON_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas)
find_library(MEGATRON_CBLAS_LIBRARY NAMES openblas blis cblas)
mark_as_advanced(MEGATRON_ONEDNN_INCLUDE MEGATRON_ONEDNN_LIBRARY MEGATRON_CBLAS_INCLUDE MEGATRON_CBLAS_LIBRARY)

set(MEGATRON_GEMMS)
if(MEGATRON_ONEDNN_INCLUDE AND MEGATRON_ONEDNN_LIBRARY)
    list(APPEND MEGATRON_GEMMS onednn)
endif()
if(MEGATRON_CBLAS_INCLUDE AND MEGATRON_CBLAS_LIBRARY)
    list(APPEND MEGATRON_GEMMS cblas)
endif()
list(APPEND MEGATRON_GEMMS builtin)

if(MEGATRON_GEMM STREQUAL "auto")
    list(GET MEGATRON_GEMMS 0 MEGATRON_GEMM_CHOSEN)
elseif(MEGATRON_GEMM IN_LIST MEGATRON_GEMMS)
    set(MEGATRON_GEMM_CHOSEN ${MEGATRON_GEMM})
else()
    message(FATAL_ERROR "megatron: MEGATRON_GEMM is \"${MEGATRON_GEMM}\", found here: ${MEGATRON_GEMMS}. "
        "On Debian and Ubuntu, onednn is libdnnl-dev and cblas is libopenblas-dev.")
endif()

# Compiles and links TARGET with a GEMM library. SCOPE is PRIVATE or INTERFACE.
function(megatron_use_gemm target scope gemm)
    if(gemm STREQUAL "onednn")
        target_compile_definitions(${target} ${scope} MT_USE_ONEDNN)
        target_include_directories(${target} SYSTEM ${scope} ${MEGATRON_ONEDNN_INCLUDE})
        target_link_libraries(${target} ${scope} ${MEGATRON_ONEDNN_LIBRARY})
    elseif(gemm STREQUAL "cblas")
        target_compile_definitions(${target} ${scope} MT_USE_CBLAS)
        target_include_directories(${target} SYSTEM ${scope} ${MEGATRON_CBLAS_INCLUDE})
        target_link_libraries(${target} ${scope} ${MEGATRON_CBLAS_LIBRARY})
    endif()
endfunction()
