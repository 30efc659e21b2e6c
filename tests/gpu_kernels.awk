# Prints the table of kernels for tests/gpu_page.sh: joins the rows of the benchmark (part=ours) with the predictions
# (part=predictions) and with the rows of the peers that have the same item and name (part=peers). Rows are
# item,"name",rate,low,high,unit,microseconds,ratio,"versus"; predictions are item,"prefix of the name",low,high,"note".
# splits a line of a CSV into field[1..]
function split_row(line,   i, c, quoted) {
    n = 1; for (i in field) delete field[i]
    field[1] = ""
    for (i = 1; i <= length(line); i++) {
        c = substr(line, i, 1)
        if (c == "\"") quoted = !quoted
        else if (c == "," && !quoted) field[++n] = ""
        else field[n] = field[n] c
    }
}
function number(text) { return text ~ /^[0-9]*[.]?[0-9]+([eE][-+]?[0-9]+)?$/ }
# The prediction with the longest prefix of the name. Rows about the host have none.
function predicted(item, name,   i, best) {
    best = 0
    if (name ~ /, (host|launches)$/) return best
    for (i = 1; i <= guesses; i++)
        if (guess_item[i] == item && index(name, guess_name[i]) == 1 &&
            (!best || length(guess_name[i]) > length(guess_name[best]))) best = i
    if (best) used[best] = 1
    return best
}
{ split_row($0) }
part == "predictions" {
    guess_item[++guesses] = field[1]; guess_name[guesses] = field[2]
    low[guesses] = field[3]; high[guesses] = field[4]
    next
}
part == "peers" {
    key = field[1] SUBSEP field[2]
    if (!(key in peer)) order[++peers] = key
    peer[key] = peer[key] (peer[key] == "" ? "" : ", ") (field[9] == "" ? "peer" : field[9]) " "
    if (number(field[7])) {
        peer[key] = peer[key] sprintf("%.1f", field[7])
        if (!(key in fastest) || field[7] + 0 < fastest[key]) fastest[key] = field[7] + 0
    } else peer[key] = peer[key] "has no time"
    next
}
{
    key = field[1] SUBSEP field[2]; seen[key] = 1
    limit = against = "-"
    of_limit = number(field[8]) ? field[8] + 0 : 0 # a field is text, which "<" compares letter by letter
    us = number(field[7]) ? field[7] + 0 : 0
    if (of_limit > 0) {
        limit = sprintf("%.4g %s", field[3] / of_limit, field[6])
        against = sprintf("%.2f", of_limit)
    }
    range = verdict = "-"
    if (i = predicted(field[1], field[2])) {
        range = low[i] " to " high[i]
        verdict = against == "-" ? "missing" : of_limit > 1.1 * high[i] ? "better" : \
            of_limit < 0.9 * low[i] ? "worse" : "as predicted"
        verdicts[verdict]++
    }
    ratio = key in fastest && us > 0 ? sprintf("%.2f", fastest[key] / us) : "-"
    printf "| %s | %s | %.1f | %.4g %s | %s | %s | %s | %s | %s | %s |\n", field[1], field[2], field[7], field[3],
        field[6], limit, against, range, verdict, key in peer ? peer[key] : "-", ratio
}
END {
    for (i = 1; i <= guesses; i++)
        if (!used[i]) {
            printf "| %s | %s ... | | | | | %s to %s | missing | | |\n", guess_item[i], guess_name[i], low[i],
                high[i]
            verdicts["missing"]++
        }
    for (i = 1; i <= peers; i++)
        if (!(order[i] in seen)) {
            split(order[i], both, SUBSEP)
            printf "| %s | %s | - | - | - | - | - | - | %s | - |\n", both[1], both[2], peer[order[i]]
        }
    printf "\nAgainst the predictions: %d as predicted, %d better, %d worse, %d missing\n", verdicts["as predicted"],
        verdicts["better"], verdicts["worse"], verdicts["missing"]
}
