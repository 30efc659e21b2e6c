#!/usr/bin/perl
# Puts all bugs of the lists into a copy of the headers, each with a run-time check that selects it; see ../planted.sh.
#
#   perl plant.pl FOLDER LIST...     reads the headers of the working directory, writes those with the bugs to FOLDER
#
# Prints a line for each bug, its fields separated by tabs: number, list, title, program, settings, case, line, split;
# or, for a bug that cannot be planted: 0, list, title, error.
use strict;
use warnings;

my @headers = qw(mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h);
my ($folder, @lists) = @ARGV;
my (%text, %cuts);

sub slurp {
    my ($name) = @_;
    open my $in, '<', $name or die "$name: $!\n";
    local $/;
    return <$in>;
}

sub read_list {
    my ($name) = @_;
    my @bugs;
    my ($list) = $name =~ m{([^/]*)\.txt$};
    for (split /\n/, slurp($name)) {
        next if /^#|^\s*$/;
        /^(bug|run|case|in|line|split|-|\+)\s+(.*)$/ or die "$name: not a line of a list: $_\n";
        push @bugs, { list => $list } if $1 eq 'bug';
        $bugs[-1]{$1} = defined $bugs[-1]{$1} ? "$bugs[-1]{$1}\n$2" : $2;
    }
    return @bugs;
}

# Returns the ranges of the bodies of a function or a structure; without a name, the whole text.
sub bodies {
    my ($header, $name) = @_;
    my @bodies;
    my $text = \$text{$header};
    return [0, length $$text] unless defined $name;
    for (my $at = 0; ($at = index $$text, $name, $at) >= 0; $at = index $$text, "\n", $at) {
        my $line = 1 + rindex $$text, "\n", $at;
        pos($$text) = $line;
        push @bodies, [$line, index $$text, "\n}", $line]
            if $$text =~ /\G(?:[^\s#\/][^\n]*\b| {4})\Q$name\E(\([^;{}]*)? ?\{/g;
    }
    return @bodies;
}

# Returns all places of the old text. Its white space matches any white space and comments.
sub places {
    my ($bug) = @_;
    my $pattern = join '(?:\s|/\*(?:(?!\*/).)*\*/)+', map { quotemeta } split ' ', $bug->{'-'};
    my @places;
    for my $header (@headers) {
        for my $body (bodies($header, $bug->{in})) {
            my ($begin, $end) = @$body;
            my $part = substr $text{$header}, $begin, $end - $begin;
            push @places, [$header, $begin + $-[0], $begin + $+[0]] while $part =~ /$pattern/gs;
        }
    }
    return @places;
}

sub planted {
    my ($bug, $old) = @_;
    my $new = defined $bug->{'+'} ? $bug->{'+'} : '';
    my $ask = "mti_planted($bug->{number})";
    return $new if $new =~ s/\bPLANTED\b/$ask/g;
    return $old =~ /[;}]$/ ? "if ($ask) { $new } else { $old }" : "($ask ? ($new) : ($old))";
}

sub plant {
    my ($bug) = @_;
    return 'it has no old text' unless defined $bug->{'-'};
    return 'it has no program' unless defined $bug->{run} || defined $bug->{line};
    my @places = places($bug);
    return 'its old text is there ' . scalar(@places) . ' times, not once' if @places != 1;
    my ($header, $begin, $end) = @{ $places[0] };
    for my $cut (@{ $cuts{$header} }) {
        return "it overlaps with '$cut->[2]{bug}'" if $begin < $cut->[1] && $end > $cut->[0];
    }
    push @{ $cuts{$header} }, [$begin, $end, $bug];
    return;
}

$text{$_} = slurp($_) for @headers;
$cuts{$_} = [] for @headers;
my $number = 0;
for my $bug (map { read_list($_) } @lists) {
    my $wrong = plant($bug);
    $bug->{number} = defined $wrong ? 0 : ++$number;
    my @run = split ' ', defined $bug->{run} ? $bug->{run} : 'train_gpt';
    my $program = pop @run;
    my @fields = ($bug->{list}, $bug->{bug});
    push @fields, defined $wrong ? $wrong : ($program, "@run");
    push @fields, map { defined $bug->{$_} ? $bug->{$_} : '' } qw(case line split) unless defined $wrong;
    print join("\t", $bug->{number}, map { $_ eq '' ? '-' : $_ } @fields), "\n";
}
for my $header (@headers) {
    for my $cut (sort { $b->[0] <=> $a->[0] } @{ $cuts{$header} }) {
        my ($begin, $end, $bug) = @$cut;
        substr $text{$header}, $begin, $end - $begin, planted($bug, substr($text{$header}, $begin, $end - $begin));
    }
    open my $out, '>', "$folder/$header" or die "$folder/$header: $!\n";
    print $out $header eq 'mt_comm.h' ? "#include \"planted.h\"\n" : '', $text{$header};
    close $out or die "$folder/$header: $!\n";
}
