# Removes the comments of C, and empties its strings and characters, unless keep is set. Lines keep their numbers.
{
    line = $0; code = ""
    while (line != "") {
        if (in_comment) {
            if (!(at = index(line, "*/"))) break
            line = substr(line, at + 2); in_comment = 0; continue
        }
        if (!match(line, /\/\*|\/\/|"|\047/)) { code = code line; break }
        token = substr(line, RSTART, RLENGTH)
        code = code substr(line, 1, RSTART - 1); line = substr(line, RSTART + RLENGTH)
        if (token == "//") break
        if (token == "/*") { in_comment = 1; continue }
        closing = token == "\"" ? "^([^\"\\\\]|\\\\.)*\"" : "^([^\047\\\\]|\\\\.)*\047"
        if (!match(line, closing)) RLENGTH = length(line)
        code = code token (keep ? substr(line, 1, RLENGTH) : token)
        line = substr(line, RLENGTH + 1)
    }
    print code
}
