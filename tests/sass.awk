# Measures the machine code of kernels, for tests/sass.sh, which prepares the input. It has these lines:
#
#   K MANGLED NAME                             the name to print
#   R MANGLED REGISTERS SHARED STACK SPILLS    what ptxas says; SPILLS are bytes of stores and loads
#   T MANGLED THREADS                          the launch bound
#   B MANGLED ADDRESS TARGET...                where an indirect branch may go
#   F MANGLED                                  the instructions of this kernel follow
#   I ADDRESS INSTRUCTION                      addresses are hexadecimal
#
# The output has a head, and one line for each kernel. thrd is the launch bound, bl the number of blocks that fit on a
# multiprocessor. shared and stack are bytes, spill the bytes of spill stores and loads. The other columns count
# instructions. ld16 and st16 access global memory with 16 bytes, ldn and stn with fewer. async are asynchronous copies,
# which ld16 or ldn counts, too. local access local memory: spills, and arrays with an index. mma are all products of
# tensor cores, fp32 the multiplications and additions in f32.
#
# The columns path, worst, bytes and narrow describe the hot paths: the fewest and the most instructions of one, its
# bytes of global memory, and its accesses with fewer than 16 bytes. They lie in the innermost loop that moves most
# bytes in one iteration. In this loop they are the paths from its head back to it that move most bytes, and of these
# those with the fewest narrow accesses. So they are the paths of whole vectors, in the widest of the types that the
# kernel chooses from when it runs. A called function counts as one instruction, and an instruction with a predicate as
# executed. When no loop moves bytes, the hot paths are those of the whole kernel, with each loop run once at most.
#
# A pass is the kernel without its loops, or a loop without the loops in it. The column passes has the kernel and the
# three loops that move most bytes in one iteration, as INSTRUCTIONS/BYTES: those of the hot paths of the pass.

function number_of(address) {
    sub(/^0x/, "", address)
    sub(/^0+/, "", address)
    return address == "" ? "0" : address
}

# The bytes of global or generic memory that a thread moves.
function bytes_of(op) {
    if (op !~ /^(LDG|STG|LDGSTS|LD|ST)(\.|$)/) return 0
    if (op ~ /\.128(\.|$)/) return 16
    if (op ~ /\.64(\.|$)/) return 8
    if (op ~ /\.[US]16(\.|$)/) return 2
    if (op ~ /\.[US]8(\.|$)/) return 1
    return 4
}

function count(op,  size) {
    size = bytes_of(op)
    total++
    if (op ~ /^LDGSTS/) { async++; if (size == 16) ld16++; else ldn++ }
    else if (op ~ /^LD/ && size) { if (size == 16) ld16++; else ldn++ }
    else if (op ~ /^ST/ && size) { if (size == 16) st16++; else stn++ }
    else if (op ~ /^(LDL|STL)(\.|$)/) local++
    else if (op ~ /^LDSM/) ldsm++
    else if (op ~ /^LDS(\.|$)/) lds++
    else if (op ~ /^[HBDI]MMA|^HGMMA/) mma++
    else if (op ~ /^MUFU/) mufu++
    else if (op ~ /^F(FMA|MUL|ADD)/) fp32++
}

# Splits the instructions 1..n into blocks. Block b has insns[b] instructions, which move by[b] bytes. na[b] accesses
# have fewer than 16 bytes. The blocks to[b, 1..ways[b]] may follow it. The kernel may end in it if ends[b] is 1.
function make_blocks(  i, b, k, parts, m) {
    split("", leads); split("", block_at); split("", insns); split("", by); split("", na); split("", ways)
    split("", to); split("", from); split("", comes); split("", ends)
    leads[1] = 1
    for (i = 1; i <= n; i++) {
        if (target[i] != "" && (target[i] in at)) leads[at[target[i]]] = 1
        if (jumps[i] || target[i] != "") leads[i + 1] = 1
        if (!((name, address[i]) in indirect)) continue
        m = split(indirect[name, address[i]], parts, " ")
        for (k = 1; k <= m; k++) leads[at[number_of(parts[k])]] = 1
    }
    blocks = 0
    for (i = 1; i <= n; i++) {
        if (i in leads) blocks++
        block_at[i] = blocks
        insns[blocks]++
        size = bytes_of(op[i])
        by[blocks] += size
        if (size > 0 && size < 16) na[blocks]++
    }
    for (i = 1; i <= n; i++) {
        b = block_at[i]
        if (i < n && block_at[i + 1] == b) continue
        if (target[i] != "" && (target[i] in at)) link(b, block_at[at[target[i]]])
        if ((name, address[i]) in indirect) {
            m = split(indirect[name, address[i]], parts, " ")
            for (k = 1; k <= m; k++) link(b, block_at[at[number_of(parts[k])]])
        }
        if (op[i] ~ /^EXIT/) ends[b] = 1
        if (i < n && !(jumps[i] && !conditional[i])) link(b, b + 1)
    }
}

function link(b, s) {
    to[b, ++ways[b]] = s
    from[s, ++comes[s]] = b
}

# Walks through all blocks from the first, depth first. Sets post[1..posts], a block after those that follow it,
# place[b] in this order, and heads: the blocks to which an edge goes back.
function walk(  depth, stack, next_way, state, b, s) {
    split("", post); split("", place); split("", heads); split("", latches)
    posts = 0
    depth = 1
    stack[1] = 1
    state[1] = 1
    while (depth > 0) {
        b = stack[depth]
        if (next_way[b] < ways[b]) {
            s = to[b, ++next_way[b]]
            if (state[s] == 1) { heads[s] = 1; latches[s, b] = 1 }
            else if (!state[s]) { state[s] = 1; stack[++depth] = s }
        } else {
            state[b] = 2
            post[++posts] = b
            place[b] = posts
            depth--
        }
    }
}

# Sets body to the blocks of the loop of this head. Returns whether it has no other loop in it.
function find_body(head,  b, k, p, todo, left, innermost) {
    split("", body)
    body[head] = 1
    left = 0
    innermost = 1
    for (k = 1; k <= comes[head]; k++)
        if (((head, from[head, k]) in latches) && !(from[head, k] in body)) {
            todo[++left] = from[head, k]
            body[from[head, k]] = 1
        }
    while (left > 0) {
        b = todo[left--]
        if (b in heads) innermost = 0
        for (k = 1; k <= comes[b]; k++) {
            p = from[b, k]
            if (!(p in body) && (p in place)) { body[p] = 1; todo[++left] = p }
        }
    }
    return innermost
}

# Sets inner[b] to the head of the innermost loop with block b, and is_innermost[head].
function find_loops(  h, b, size, least) {
    split("", inner); split("", is_innermost)
    for (h = 1; h <= blocks; h++) {
        if (!(h in heads)) continue
        is_innermost[h] = find_body(h)
        size = 0
        for (b in body) size++
        for (b in body) if (!(b in least) || size < least[b]) { least[b] = size; inner[b] = h }
    }
}

# Finds the hot paths from block `first` back to it (head == first), or to the end of the kernel (head == 0), through
# the blocks of body, none of them twice. Sets bytes, narrow, path (the fewest instructions) and worst (the
# most). bytes is -1 if there is no path. With `alone`, the blocks of other loops than the one of head count nothing.
function find_path(first, head, alone,  i, b, k, s, best_by, best_na, fewest, most) {
    for (i = 1; i <= posts; i++) {
        b = post[i]
        if (!(b in body)) continue
        bytes = -1
        for (k = 1; k <= ways[b] + 1; k++) {
            s = k <= ways[b] ? to[b, k] : 0
            if (s == head && (s > 0 || ends[b])) compare(0, 0, 0, 0)
            else if (s > 0 && (s in best_by)) compare(best_by[s], best_na[s], fewest[s], most[s])
        }
        if (bytes < 0) continue
        s = !alone || inner[b] + 0 == head
        best_by[b] = bytes + s * by[b]
        best_na[b] = narrow + s * na[b]
        fewest[b] = path + s * insns[b]
        most[b] = worst + s * insns[b]
    }
    bytes = (first in best_by) ? best_by[first] : -1
    narrow = best_na[first] + 0
    path = fewest[first] + 0
    worst = most[first] + 0
}

# Compares a way with the best so far, and takes the better one, or both.
function compare(by_, na_, fewest_, most_) {
    if (by_ < bytes || (by_ == bytes && na_ > narrow)) return
    if (by_ > bytes || na_ < narrow) {
        bytes = by_
        narrow = na_
        path = fewest_
        worst = most_
        return
    }
    if (fewest_ < path) path = fewest_
    if (most_ > worst) worst = most_
}

function whole_kernel(  i) {
    split("", body)
    for (i = 1; i <= posts; i++) body[post[i]] = 1
}

# Sets passes.
function find_passes(  h, i, k, n, by_, worst_) {
    for (h = 0; h <= blocks; h++) {
        if (h > 0 && !(h in heads)) continue
        if (h > 0) find_body(h)
        else whole_kernel()
        find_path(h > 0 ? h : 1, h, 1)
        if (h == 0) passes = worst "/" bytes
        if (h == 0 || bytes <= 0) continue
        for (i = ++n; i > 1 && (by_[i - 1] < bytes || (by_[i - 1] == bytes && worst_[i - 1] < worst)); i--) {
            by_[i] = by_[i - 1]
            worst_[i] = worst_[i - 1]
        }
        by_[i] = bytes
        worst_[i] = worst
    }
    for (i = 1; i <= n && i <= 3; i++) passes = passes "," worst_[i] "/" by_[i]
}

function hot_path(  h, best, hot_least, hot_worst, hot_narrow) {
    make_blocks()
    walk()
    find_loops()
    find_passes()
    best = 0
    for (h = 1; h <= blocks; h++) {
        if (!is_innermost[h]) continue
        find_body(h)
        find_path(h, h, 0)
        if (bytes < best || bytes <= 0 || (bytes == best && worst <= hot_worst)) continue
        best = bytes
        hot_narrow = narrow
        hot_least = path
        hot_worst = worst
    }
    if (best > 0) {
        bytes = best
        narrow = hot_narrow
        path = hot_least
        worst = hot_worst
        return
    }
    whole_kernel()
    find_path(1, 0, 0)
}

# The blocks that fit on a multiprocessor of 65536 registers and 2048 threads, in units of 8 registers per thread and a
# quarter of the registers for each of four groups of warps. Shared memory is not counted.
function blocks_of(registers, threads,  warps, fit) {
    warps = int((threads + 31) / 32)
    fit = 4 * int(512 / (int((registers + 7) / 8) * 8))
    if (fit > 64) fit = 64
    fit = int(fit / warps)
    return fit > 32 ? 32 : fit
}

function finish() {
    if (name == "") return
    hot_path()
    if (!(name in threads)) threads[name] = 1024
    printf form "%31s %s\n", threads[name], registers[name], blocks_of(registers[name], threads[name]), shared[name], \
        stack_of[name], spills[name], local, ld16, ldn, st16, stn, async, lds, ldsm, mma, mufu, fp32, total, \
        path, worst, bytes, narrow, passes, (name in known ? known[name] : name)
    name = ""
}

BEGIN {
    columns = split("thrd regs bl shared stack spill local ld16 ldn st16 stn async lds ldsm mma mufu fp32 total path" \
        " worst bytes narrow", column, " ")
    for (i = 1; i <= columns; i++) {
        form = form "%" (length(column[i]) < 4 ? 4 : length(column[i])) "d "
        head = head sprintf("%" (length(column[i]) < 4 ? 4 : length(column[i])) "s ", column[i])
    }
    print head sprintf("%31s ", "passes") "kernel"
}
$1 == "K" { text = $0; sub(/^K [^ ]* /, "", text); known[$2] = text }
$1 == "R" { registers[$2] = $3; shared[$2] = $4; stack_of[$2] = $5; spills[$2] = $6 }
$1 == "T" { threads[$2] = $3 }
$1 == "B" { text = $0; sub(/^B [^ ]* [^ ]* /, "", text); indirect[$2, number_of($3)] = text }
$1 == "F" {
    finish()
    name = $2
    n = total = ld16 = ldn = st16 = stn = async = local = lds = ldsm = mma = mufu = fp32 = 0
    split("", address); split("", op); split("", target); split("", jumps); split("", conditional); split("", at)
}
$1 == "I" {
    n++
    address[n] = number_of($2)
    at[address[n]] = n
    has = $3 ~ /^@/
    op[n] = has ? $4 : $3
    count(op[n])
    if (op[n] !~ /^(BRA|BRX|BRXU|JMP|EXIT|RET|CALL)(\.|$)/) next
    if (op[n] ~ /^CALL/) next
    jumps[n] = 1
    conditional[n] = has || NF > 4 || op[n] ~ /^BRA\.(DIV|CONV)/
    if (op[n] ~ /^(BRX|EXIT|RET)/) conditional[n] = has
    if (op[n] ~ /^(BRA|JMP)/ && $NF ~ /^0x/) target[n] = number_of($NF)
}
END { finish() }
