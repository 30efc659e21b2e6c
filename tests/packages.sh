# shellcheck shell=sh
# Read by tests/run.sh and examples/train.sh: finds what is installed on this machine, and installs what is missing.
#
#   MT_TEST_WITHOUT="cmake dnnl openblas openmpi clang aarch64 nvcc ..."   treat these as missing and not installable
#   MT_INSTALL=no                                                 install nothing, only report what is missing

# For programs that define MEGATRON_IMPLEMENTATION, but are linked to another build of the implementation.
DECLARATIONS_ONLY="-DMEGATRON_IMPLEMENTED -DMT_PARALLEL_IMPLEMENTED -DMT_KERNELS_IMPLEMENTED -DMT_COMM_IMPLEMENTED"

# find_implementation FOLDER: sets `declarations` and `implementation`, flags and an argument to compile a program that
# has only declarations, and link it to an implementation with the built-in GEMM: that of CMake
# ($MT_TEST_IMPLEMENTATION), else one that is built in FOLDER. In the full matrix, a program compiles the implementation
# itself, as a reader's does.
find_implementation() {
    declarations='' implementation=-lm
    [ "${MT_TEST_ALL:-0}" != 1 ] || return 0
    declarations=$DECLARATIONS_ONLY implementation=${MT_TEST_IMPLEMENTATION:-$1/implementation.o}
    [ -z "${MT_TEST_IMPLEMENTATION:-}" ] && [ "${found_implementation:-}" != "$implementation" ] || return 0
    "$CC" -O2 -I. -c tests/package/implementation.c -o "$implementation" && found_implementation=$implementation
}

# The flags of AddressSanitizer and UndefinedBehaviorSanitizer. tests/CMakeLists.txt reads this line. -g1 has the line
# numbers that reports of sanitizers need; -g takes the compiler a third longer.
SANITIZE="-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"

# Links tests/kill_at.c. tests/CMakeLists.txt reads this line, too.
KILL_AT=-Wl,--wrap=write,--wrap=rename,--wrap=fsync,--wrap=openat,--wrap=unlinkat,--wrap=mkdir

CC=${CC:-cc}
CXX=${CXX:-c++}

# Does MT_TEST_WITHOUT hide $1?
hidden() {
    case " ${MT_TEST_WITHOUT:-} " in
    *" $1 "*) return 0 ;;
    esac
    return 1
}

have_command() { ! hidden "$1" && command -v "$1" >/dev/null 2>&1; }

# have_library NAME HEADER LIBRARY: does a program with this header compile and link?
have_library() {
    hidden "$1" && return 1
    printf '%s\n' '#include <stdarg.h>' '#include <stddef.h>' '#include <stdint.h>' '#include <setjmp.h>' \
        "#include <$2>" 'int main(void) { return 0; }' | "$CC" -x c - -o /dev/null "-l$3" 2>/dev/null
}

# Is the package $1 (its Debian and Ubuntu name), or an equivalent, installed?
have_package() {
    case $1 in
    build-essential) have_command "$CC" && have_command "$CXX" && have_command make && have_library libc stdio.h m ;;
    libdnnl-dev) have_library dnnl dnnl.h dnnl ;;
    libopenblas-dev) have_library openblas cblas.h openblas ;;
    openmpi-bin) ! hidden openmpi && have_command mpirun ;;
    libopenmpi-dev) ! hidden openmpi && have_command mpicc ;;
    gcc-aarch64-linux-gnu) ! hidden aarch64 && have_command aarch64-linux-gnu-gcc ;;
    libc6-dev-arm64-cross) ! hidden aarch64 && [ -e /usr/aarch64-linux-gnu/include/stdio.h ] ;;
    qemu-user) ! hidden aarch64 && have_command qemu-aarch64 ;;
    locales) [ -e /usr/share/i18n/locales/de_DE ] || locale -a 2>/dev/null | grep -q '^de_DE' ;;
    *) have_command "$1" ;;
    esac
}

# Prints the flags of the fastest GEMM library that is installed; nothing: the built-in GEMM.
fastest_gemm() {
    if have_package libdnnl-dev; then
        echo "-DMT_USE_ONEDNN -ldnnl"
    elif have_package libopenblas-dev; then
        echo "-DMT_USE_CBLAS -lopenblas"
    fi
}

missing_packages() {
    for package in "$@"; do
        have_package "$package" || printf '%s ' "$package"
    done
}

# Prints the command prefix that gives root without a prompt ("" for root itself). Fails where there is none.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        return 0
    fi
    sudo -n true 2>/dev/null && echo "sudo -n"
}

# An older release may lack a package: the others are still installed.
apt_install() {
    root=$1
    shift
    apt_get="$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y"
    echo "Installing: $*"
    # Package lists are empty on a fresh machine, and may name deleted files on an old one.
    $apt_get update >/dev/null || echo "apt-get update failed; trying with the package lists that are here"
    $apt_get install --no-install-recommends "$@" >/dev/null </dev/null && return 0
    for package in "$@"; do
        $apt_get install --no-install-recommends "$package" >/dev/null </dev/null || echo "Could not install $package"
    done
}

# Installs the missing packages if it is allowed to. Otherwise prints what to install.
ensure_packages() {
    wanted=
    for package in $(missing_packages "$@"); do
        hidden_package "$package" || wanted="$wanted $package"
    done
    [ -n "$wanted" ] || return 0
    if [ "${MT_INSTALL:-yes}" != no ] && command -v apt-get >/dev/null 2>&1 && root=$(as_root); then
        # shellcheck disable=SC2086  # a list of words
        apt_install "$root" $wanted
    else
        echo "Missing, and not installed by this script" \
            "(which takes apt-get, root, and MT_INSTALL other than no):$wanted"
        echo "  On Debian or Ubuntu: sudo apt-get install$wanted"
        echo "  Elsewhere, as far as listed: C and C++ compiler with make, CMake, oneDNN, OpenBLAS, pkg-config, clang"
    fi
}

# Packages that MT_TEST_WITHOUT hides are not installed.
hidden_package() {
    case $1 in
    libdnnl-dev) hidden dnnl ;;
    libopenblas-dev) hidden openblas ;;
    openmpi-bin | libopenmpi-dev) hidden openmpi ;;
    gcc-aarch64-linux-gnu | libc6-dev-arm64-cross | qemu-user) hidden aarch64 ;;
    build-essential) hidden "$CXX" || hidden make ;;
    *) hidden "$1" ;;
    esac
}

python_has() {
    interpreter=$1
    shift
    for module in "$@"; do "$interpreter" -c "import $module" 2>/dev/null || return 1; done
}

# find_python FOLDER PACKAGE...: sets python to one that can import each PACKAGE: python3, or that of a virtual
# environment in FOLDER. Installs them there unless MT_INSTALL=no. Package and module must have the same name.
find_python() {
    environment=$1
    shift
    for python in python3 "$environment/bin/python"; do
        python_has "$python" "$@" && return 0
    done
    [ "${MT_INSTALL:-yes}" != no ] || return 1
    { python3 -m venv "$environment" || { ensure_packages python3-venv && python3 -m venv "$environment"; }; } &&
        "$environment/bin/pip" install --quiet "$@" && python_has "$python" "$@"
}

# nvcc_fast [NVCC]: prints nvcc's flag for the fastest compilation of kernels, if there is one: for programs that are
# not run
nvcc_fast() { "${1:-nvcc}" --help | grep -q -e --Ofast-compile && echo -Ofc=max; }

# find_nvcc: fails where there is no nvcc. Puts its folder into PATH where only $CUDA_HOME or /usr/local/cuda* has it.
find_nvcc() {
    ! hidden nvcc || return 1
    command -v nvcc >/dev/null 2>&1 && return 0
    for folder in "${CUDA_HOME:-/usr/local/cuda}/bin" /usr/local/cuda/bin /usr/local/cuda-*/bin; do
        [ -x "$folder/nvcc" ] || continue
        PATH=$folder:$PATH
        export PATH
        return 0
    done
    return 1
}

# Prints the folders that may have libraries of CUDA: $MT_GPU_LIBS, those of nvcc, of the system and of Python's
# packages.
cuda_folders() {
    [ -z "${MT_GPU_LIBS:-}" ] || printf '%s\n' "$MT_GPU_LIBS" "$MT_GPU_LIBS/lib"
    nvcc=$(command -v nvcc)
    for toolkit in "${nvcc%/bin/nvcc}" "$(readlink -f "$nvcc" | sed 's,/bin/nvcc$,,')"; do
        printf '%s\n' "$toolkit/lib64" "$toolkit/lib" "$toolkit"/targets/*/lib
    done
    echo "${LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}" | tr ':' '\n'
    ldconfig -p 2>/dev/null | sed -n 's,.*=> \(.*\)/lib\(cublasLt\|nccl\|cudnn\)\.so.*,\1,p'
    printf '%s\n' /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib
    ! have_command python3 || python3 -c '
import glob, sys
for folder in sys.path:
    print(*glob.glob(glob.escape(folder) + "/nvidia/*/lib"), sep="\n")' 2>/dev/null
}

# cuda_version HEADER...: prints the version that these headers of a library define
cuda_version() {
    cat "$@" 2>/dev/null | awk '/^#define (CUBLAS_VER|NCCL|CUDNN)_(MAJOR|MINOR|PATCH|PATCHLEVEL) / && !seen[$2]++ {
        version = version (version == "" ? "" : ".") $3 } END { print version }'
}

# cuda_library FOLDER NAME: prints the path of libNAME.so or libNAME.so.N in the folder
cuda_library() {
    for file in "$1/lib$2.so" "$1/lib$2.so".[0-9]*; do
        [ ! -f "$file" ] || { echo "$file"; return; }
    done
    return 1
}

# cuda_headers LIBRARY NAME HEADERS: prints the folder with the headers of the library. They are beside it, with NAME.h,
# and of its version as far as both tell it.
cuda_headers() {
    number=$(readlink -f "$1")
    case $number in */"lib$2.so".*) number=${number##*/"lib$2.so".} ;; *) number='' ;; esac
    for beside in include ../include ../../include .; do
        beside=${1%/*}/$beside
        [ -f "$beside/$2.h" ] || continue
        version=$(cuda_version "$beside/$3"*.h)
        case $version. in "$number".* | .) echo "$beside"; return ;; esac
        case $number. in "$version".* | .) echo "$beside"; return ;; esac
    done
    return 1
}

# link_cuda_library INTO NAME HEADERS: links libNAME.so and the files HEADERS* into INTO/lib and INTO/include. Prints
# its version and place. Takes the first folder that has the library and its headers, else the first that has the
# library. Fails where there is no libNAME.so or libNAME.so.N.
link_cuda_library() {
    library='' headers=''
    while read -r folder; do
        { [ -n "$folder" ] && file=$(cuda_library "$folder" "$2"); } || continue
        : "${library:=$file}"
        headers=$(cuda_headers "$file" "$2" "$3") || continue
        library=$file
        break
    done <"$1/folders"
    [ -n "$library" ] || return 1
    folder=$(cd "${library%/*}" && pwd)
    for each in "$folder/lib$2.so" "$folder/lib$2.so".[0-9]*; do
        [ ! -f "$each" ] || ln -sf "$each" "$1/lib/"
    done
    [ -f "$1/lib/lib$2.so" ] || ln -sf "$folder/${library##*/}" "$1/lib/lib$2.so"
    [ -z "$headers" ] || ln -sf "$(cd -P "$headers" && pwd)/$3"* "$1/include/"
    version=$(cuda_version "$1/include/$3"*.h)
    echo "$2 ${version:-of unknown version}: $folder/${library##*/}"
}

# find_cuda_libraries INTO: finds cuBLASLt, NCCL and cuDNN, also those that lack the link libNAME.so which a linker
# needs, as in Python's packages. Links them into the new folder INTO. Prints a line for each.
find_cuda_libraries() {
    rm -rf "$1"
    mkdir -p "$1/lib" "$1/include" && cuda_folders >"$1/folders" || return 1
    for name in cublasLt nccl cudnn; do
        headers=${name%Lt}
        { ! hidden "$headers" && link_cuda_library "$1" "$name" "$headers"; } || echo "$name: not found"
    done
}

# cublas_flags INTO: prints nvcc's flags to link with cuBLASLt. INTO, an absolute path, is the folder of
# find_cuda_libraries, which is called when there is no such folder.
cublas_flags() {
    [ -d "$1" ] || find_cuda_libraries "$1" >&2
    echo "-I$1/include -L$1/lib -Xlinker -rpath -Xlinker $1/lib -lcublasLt"
}

# need_gpu FOLDER WORDS [COMMAND...]: prints the GPU of this machine; later `FOLDER/probe count` prints how many there
# are. Without a GPU or without nvcc, prints this and WORDS, and ends the script with status 77; with 1 when the GPU
# cannot be used. The probe, built in FOLDER, has no kernels, so only the host compiler runs. COMMAND runs it, with a
# time limit; without COMMAND, timeout with 60 s.
need_gpu() {
    folder=$1 words=$2
    shift 2
    [ $# -gt 0 ] || set -- timeout -k 5 60
    find_nvcc || { echo "no GPU: nvcc is not here to build for one; $words"; exit 77; }
    cat >"$folder/probe.cpp" <<'END'
#include <cstdio>
#include <cuda_runtime_api.h>
int main(int argc, char **) {
    int n = 0;
    cudaDeviceProp gpu;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0 || cudaGetDeviceProperties(&gpu, 0) != cudaSuccess) return 1;
    if (argc > 1) printf("%d\n", n);
    else printf("%s, sm_%d%d, %d of them\n", gpu.name, gpu.major, gpu.minor, n);
    return 0;
}
END
    nvcc "$folder/probe.cpp" -o "$folder/probe" >&2 || { echo "a program that uses CUDA does not compile"; exit 1; }
    "$@" "$folder/probe"
    case $? in
    0) ;;
    124 | 137) echo "the GPU does not answer: the program that asks for it was killed"; exit 1 ;;
    *) echo "no GPU: CUDA finds none; $words"; exit 77 ;;
    esac
}
