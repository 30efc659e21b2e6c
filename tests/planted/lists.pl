# What plant.pl and ../mutants/mutate.pl share: they read lists of changes, and find the places of old texts.
use strict;
use warnings;

sub slurp {
    my ($name) = @_;
    open my $in, '<', $name or die "$name: $!\n";
    local $/;
    return <$in>;
}

# Reads a list. `words` are the words with which its lines begin; the first one begins an entry.
sub read_list {
    my ($name, @words) = @_;
    my (@entries, $words);
    $words = join '|', map { quotemeta } @words;
    for (split /\n/, slurp($name)) {
        next if /^#|^\s*$/;
        /^($words)\s+(.*)$/ or die "$name: not a line of a list: $_\n";
        push @entries, {} if $1 eq $words[0];
        $entries[-1]{$1} = defined $entries[-1]{$1} ? "$entries[-1]{$1}\n$2" : $2;
    }
    return @entries;
}

# Returns the ranges of the bodies of a function or a structure; without a name, the whole text.
sub bodies {
    my ($text, $name) = @_;
    my @bodies;
    return [0, length $$text] unless defined $name;
    for (my $at = 0; ($at = index $$text, $name, $at) >= 0; $at = index $$text, "\n", $at) {
        my $line = 1 + rindex $$text, "\n", $at;
        pos($$text) = $line;
        push @bodies, [$line, index $$text, "\n}", $line]
            if $$text =~ /\G(?:[^\s#\/][^\n]*\b| {4})\Q$name\E(\([^;{}]*)? ?\{/g;
    }
    return @bodies;
}

# Returns the ranges of an old text in the bodies. Its white space matches any white space and comments.
sub places_of {
    my ($text, $old, $name) = @_;
    my $pattern = join '(?:\s|/\*(?:(?!\*/).)*\*/)+', map { quotemeta } split ' ', $old;
    my @places;
    for my $body (bodies($text, $name)) {
        my ($begin, $end) = @$body;
        my $part = substr $$text, $begin, $end - $begin;
        push @places, [$begin + $-[0], $begin + $+[0]] while $part =~ /$pattern/gs;
    }
    return @places;
}

1;
