#!/usr/bin/perl
# Puts all bugs of the lists into a copy of the headers, each with a run-time check that selects it; see ../planted.sh.
#
#   perl plant.pl FOLDER LIST...     reads the headers of the working directory, writes those with the bugs to FOLDER
#
# Prints a line for each program that must find a bug, its fields separated by tabs: number, list, title, program,
# settings, case, line, split; or, for a bug that cannot be planted: 0, list, title, error.
use strict;
use warnings;
use FindBin;
require "$FindBin::Bin/lists.pl";

my @headers = qw(mt_comm.h mt_kernels.cuh mt_parallel.h megatron.h);
my ($folder, @lists) = @ARGV;
my (%text, %cuts);

sub list_of {
    my ($name) = @_;
    my ($list) = $name =~ m{([^/]*)\.txt$};
    return map { { %$_, list => $list } } read_list($name, qw(bug run case in line split - +));
}

# Returns all places of the old text.
sub places {
    my ($bug) = @_;
    return map { my $header = $_; map { [$header, @$_] } places_of(\$text{$header}, $bug->{'-'}, $bug->{in}) } @headers;
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
for my $bug (map { list_of($_) } @lists) {
    my $wrong = plant($bug);
    $bug->{number} = defined $wrong ? 0 : ++$number;
    my @runs = split /\n/, defined $bug->{run} ? $bug->{run} : 'train_gpt';
    my @cases = split /\n/, defined $bug->{case} ? $bug->{case} : '';
    for my $i (0 .. $#runs) {
        my @run = split ' ', $runs[$i];
        my $program = pop @run;
        my $case = defined $cases[$i] ? $cases[$i] : '';
        my @fields = ($bug->{list}, $bug->{bug});
        push @fields, defined $wrong ? $wrong : ($program, "@run", $case);
        push @fields, map { defined $bug->{$_} ? $bug->{$_} : '' } qw(line split) unless defined $wrong;
        print join("\t", $bug->{number}, map { $_ eq '' ? '-' : $_ } @fields), "\n";
    }
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
