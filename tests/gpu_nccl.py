"""Makes a small libnccl.so.2 that can travel to a machine with a GPU: one with the code of one architecture.

   python3 tests/gpu_nccl.py FOLDER [ARCH [VERSION]]     FOLDER gets libnccl.so.2.xz and version; ARCH: 90

From 2.30 on, NCCL lets several ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE=1); toolkits may have an older one. pip
downloads the package nvidia-nccl-cu13 of PyPI, of the given version. Its library has 250 MB, most of it machine code
for GPUs of other architectures. That code becomes zeros, which take no space when compressed, and debug information is
stripped. The library that is left must load here and say its version, which needs no GPU.

   python3 tests/gpu_nccl.py --slim IN OUT ARCH          only clears the machine code: prints the bytes kept and cleared
"""
import glob
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

PACKAGE, NEWEST_TESTED = "nvidia-nccl-cu13", "2.30.7"
FATBIN = 0xBA55ED50  # the first word of a container of GPU code
MACHINE_CODE = 2  # the kind of an entry; PTX is 1


def sections(elf):
    """Yields (name, begin, end) of the sections of a 64-bit little-endian ELF file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise SystemExit("gpu_nccl.py: not a 64-bit little-endian ELF file")
    table, = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = heads[names][4]
    for name, _, _, _, begin, length in heads:
        at = strings + name
        yield elf[at:elf.index(b"\0", at)].decode(), begin, begin + length


def entries(elf, begin, end):
    """Yields (kind, architecture, begin, end) of the code in a section of containers, each with a head and entries."""
    at = begin
    while at + 16 <= end:
        word, version, head, size = struct.unpack_from("<IHHQ", elf, at)
        if word != FATBIN or version != 1:
            at += 8  # containers are aligned
            continue
        entry, at = at + head, at + head + size
        while entry + 64 <= at:
            kind, _, head, size = struct.unpack_from("<HHIQ", elf, entry)
            arch, = struct.unpack_from("<I", elf, entry + 28)
            if head < 64 or entry + head + size > at:
                raise SystemExit("gpu_nccl.py: an entry is longer than its container")
            yield kind, arch, entry + head, entry + head + size
            entry += head + size


def slim(elf, arch):
    """Clears the code that no GPU of this architecture runs. Returns the bytes kept and cleared."""
    kept = cleared = 0
    for name, begin, end in list(sections(elf)):
        if "fatbin" not in name or name.startswith(".nvFatBinSegment"):
            continue
        for kind, of_arch, first, last in entries(elf, begin, end):
            if kind == MACHINE_CODE and of_arch == arch:
                kept += last - first
            else:
                elf[first:last] = bytes(last - first)
                cleared += last - first
    if not kept:
        raise SystemExit(f"gpu_nccl.py: the library has no code for sm_{arch}")
    return kept, cleared


def slim_file(source, target, arch):
    with open(source, "rb") as file:
        elf = bytearray(file.read())
    kept, cleared = slim(elf, arch)
    with open(target, "wb") as file:
        file.write(elf)
    print(f"code for sm_{arch}: {kept} bytes kept, {cleared} bytes of others cleared")


def version_of(library):
    """Asks a process of its own, because a library is loaded only once."""
    code = ("import ctypes, sys; n = ctypes.c_int()\n"
            "assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(n)) == 0; print(n.value)")
    return int(subprocess.run([sys.executable, "-c", code, library], check=True, stdout=subprocess.PIPE).stdout)


def number(version):
    major, minor, patch = (int(part) for part in version.split("."))
    return major * 10000 + minor * 100 + patch


def download(folder, version):
    """Returns the library and the header of the package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    for tag in range(17, 40):  # pip takes only the named tags
        pip += ["--platform", f"manylinux_2_{tag}_x86_64"]
    subprocess.run(pip + ["--platform", "manylinux2014_x86_64", f"{PACKAGE}=={version}"], check=True)
    wheel, = glob.glob(os.path.join(folder, "*.whl"))
    with zipfile.ZipFile(wheel) as package:
        for name in package.namelist():
            if name.endswith(("/libnccl.so.2", "/include/nccl.h")):
                package.extract(name, folder)
    find = lambda name: glob.glob(os.path.join(folder, "**", name), recursive=True)[0]
    return find("libnccl.so.2"), find("nccl.h")


def main(into, arch="90", version=NEWEST_TESTED):
    os.makedirs(into, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        library, header = download(folder, version)
        small = os.path.join(folder, "small.so")
        slim_file(library, small, int(arch))
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-debug", small], check=True)
        if version_of(small) != number(version):
            raise SystemExit(f"gpu_nccl.py: the library says version {version_of(small)}, not {number(version)}")
        packed = os.path.join(into, "libnccl.so.2.xz")
        with open(small, "rb") as file, lzma.open(packed + ".new", "wb", preset=3) as out:
            shutil.copyfileobj(file, out, 1 << 20)
        shutil.copy(header, os.path.join(into, "nccl.h"))
        os.replace(packed + ".new", packed)
    with open(os.path.join(into, "version"), "w") as file:
        print(number(version), f"sm_{arch}", file=file)
    print(f"NCCL {version} for sm_{arch}: {packed}, {os.path.getsize(packed)} bytes")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--slim"] and len(sys.argv) == 5:
        slim_file(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif 2 <= len(sys.argv) <= 4 and not sys.argv[1].startswith("-"):
        main(*sys.argv[1:])
    else:
        raise SystemExit(__doc__)
