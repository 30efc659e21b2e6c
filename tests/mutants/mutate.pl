#!/usr/bin/perl
# Makes wrong parallel programs of a right one; see ../mutants.sh.
#
#   perl mutate.pl FOLDER SOURCE[:SECTION,...]... [-- LIST...]
#
# Writes a copy of each source to FOLDER, in which a number selects a mutant, and FOLDER/mutants_list.h with their
# table. These mutants are made everywhere in the sources, or in the parts of a header that come from SECTION.c in src/:
#   each function f, g, gather, scatter, and each collective: left out, called twice, replaced by its conjugate, and
#   called with the data group instead of the tensor group, or with the tensor group instead of that of context ranks
#   mt_sync_gradients, mt_accumulate_gradients, mt_params_zero_grad, its lazy form: left out, called twice
#   sequence_partial, shared_embedding, skip_bias_add: the opposite, where they are set and where they are read
#   sequence_parallel: the opposite, where it is set
# A LIST adds mutants that are not made by rules. Its format is that of ../planted.sh without `run` and `case`, and with
# `wants`: words, separated by |, of which the message has one.
use strict;
use warnings;
use FindBin;
require "$FindBin::Bin/../planted/lists.pl";

my ($folder, @arguments) = @ARGV;
my $kind = 'call'; # or value: of a list values*.txt
my (@sources, @lists, %sections, %text, %masked, @mutants);
my $into = \@sources;
for (@arguments) {
    if ($_ eq '--') { $into = \@lists; next }
    my ($name, $sections) = split /:/;
    push @$into, $name;
    $sections{$name} = { map { ("$_.c" => 1) } split /,/, $sections } if defined $sections;
}

my $region = 'mt_(?:copy_to|reduce_from|scatter_to|gather_from|reduce_scatter_to|gather_ranks_from|'
    . 'reduce_scatter_ranks_to|reduce_rows_from)_(?:tensor|sequence)_region(?:_forward|_backward)?';
my $collective = 'mt_all_reduce|mt_all_gather|mt_reduce_scatter|mt_broadcast|mti_reduce_tokens|mti_gather_features';
my $gradients = 'mt_sync_gradients|mt_accumulate_gradients|mt_params_zero_grad(?:_lazy)?';
my %conjugate = map { ("mt_$_->[0]", "mt_$_->[1]"), ("mt_$_->[1]", "mt_$_->[0]") } (
    ['copy_to_tensor_region_forward', 'reduce_from_tensor_region_forward'],
    ['copy_to_tensor_region_backward', 'reduce_from_tensor_region_backward'],
    ['scatter_to_sequence_region', 'reduce_scatter_to_sequence_region'],
);
# What a message names instead of a call: one that the library makes for its user, or any gather where one is missing.
my $sums = 'mt_reduce_from_tensor_region_forward|mt_reduce_scatter_to_sequence_region|'
    . 'mt_copy_to_tensor_region_backward';
my $gathers = 'mt_all_gather|mt_gather_from_tensor_region|mt_gather_from_sequence_region';
my %named = (
    mti_reduce_tokens => $sums, mt_reduce_from_tensor_region_forward => $sums, mti_gather_features => $gathers,
    mt_all_gather => $gathers, mt_gather_from_tensor_region => $gathers,
);
my $flag = 'sequence_partial|shared_embedding|skip_bias_add';

# The text with blanks for comments and strings, which has the same places.
sub masked {
    my ($text) = @_;
    $text =~ s{(/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*")}{ my $t = $1; $t =~ s/[^\n]/ /g; $t }gse;
    return $text;
}

# The place after the bracket that closes the one at $at.
sub closing {
    my ($text, $at) = @_;
    my $depth = 0;
    pos($$text) = $at;
    while ($$text =~ /[()]/g) {
        $depth += $& eq '(' ? 1 : -1;
        return pos($$text) if $depth == 0;
    }
    die "no closing bracket\n";
}

# The name of the function around a place.
sub function_at {
    my ($source, $at) = @_;
    my $before = substr $masked{$source}, 0, $at;
    my $name = '';
    $name = $1 while $before =~ /^[A-Za-z][^\n;={}]*?\b(\w+)\(/gm;
    return $name;
}

sub in_sections {
    my ($source, $at) = @_;
    return 1 unless $sections{$source};
    my $before = substr $text{$source}, 0, $at;
    my $section = '';
    $section = $1 while $before =~ m{^/\* ---- .*[(]src/\w+/(\w+[.]\w+)[)] -}gm;
    return $sections{$source}{$section};
}

sub mutant {
    my ($source, $begin, $end, $new, $title, $wants, $statement) = @_;
    return unless in_sections($source, $begin);
    my ($file) = $source =~ m{([^/]*)$};
    push @mutants, { source => $source, begin => $begin, end => $end, new => $new, title => $title, wants => $wants,
        statement => $statement, kind => $kind, place => "$file:" . function_at($source, $begin) };
}

sub call_mutants {
    my ($source) = @_;
    my $text = \$masked{$source};
    while ($$text =~ /\b($region|$collective|$gradients)\(/g) {
        my ($name, $begin, $open) = ($1, $-[0], $+[0] - 1);
        my $after = pos $$text;
        next if substr($$text, 0, $begin) =~ /(?:mt_status|#define)\s+$/; # a definition
        my $end = closing($text, $open);
        pos($$text) = $after;
        next unless substr($$text, $end, 1) =~ /[);:,\s]/;
        my $call = substr $text{$source}, $begin, $end - $begin;
        my $arguments = substr $text{$source}, $open, $end - $open;
        my $wants = $named{$name} || $name;
        mutant($source, $begin, $end, 'MT_SUCCESS', "$name is left out", $wants);
        mutant($source, $begin, $end, "(mt_status)($call || $call)", "$name is called twice", $wants);
        mutant($source, $begin, $end, "$conjugate{$name}$arguments", "$conjugate{$name} instead of $name",
            "$wants|$conjugate{$name}") if $conjugate{$name};
        next unless $name =~ /region/ && $name !~ /copy_to.*forward|reduce_from.*backward/;
        if ($call =~ s/\bgrid->cp\b/grid->tp/) {
            mutant($source, $begin, $end, $call, "$name over the tensor group", "$wants|tensor|context");
        } elsif ($call =~ s/\bgrid->tp\b/grid->dp/) {
            mutant($source, $begin, $end, $call, "$name over the data group", "$wants|data");
        }
    }
}

# What a message names for a flag. Between layers that differ in sequence_parallel, a gather or a scatter is missing.
sub flag_words {
    my ($name) = @_;
    my $words = 'sequence_partial|sequence_parallel';
    return $words if $name eq 'sequence_partial';
    return "$words|mt_gather_from_sequence_region|mt_scatter_to_sequence_region" if $name eq 'sequence_parallel';
    return $name =~ /bias/ ? 'bias' : $name;
}

sub flag_mutants {
    my ($source) = @_;
    my $text = \$masked{$source};
    my @set;
    while ($$text =~ /(?:\.|->)($flag|sequence_parallel)\s*=\s*(?!=)([^,;{}]+?)\s*(?=[,;}])/g) {
        mutant($source, $-[2], $+[2], '!(' . substr($text{$source}, $-[2], $+[2] - $-[2]) . ')',
            "$1 is the opposite", flag_words($1));
        push @set, [$-[2], $+[2]];
    }
    while ($$text =~ /(?<![\w.>])\w+(?:\[\w+\])?(?:(?:\.|->)\w+(?:\[\w+\])?)*(?:\.|->)($flag)\b(?!\s*=[^=])/g) {
        my ($begin, $end, $name) = ($-[0], $+[0], $1);
        next if grep { $begin >= $_->[0] && $end <= $_->[1] } @set;
        my $old = substr $text{$source}, $begin, $end - $begin;
        mutant($source, $begin, $end, "!($old)", "$name is read as the opposite", flag_words($name));
    }
}

# ---- lists ---------------------------------------------------------------------------------------------------------

sub list_mutant {
    my ($bug) = @_;
    my @places;
    for my $source (@sources) {
        push @places, map { [$source, @$_] } places_of(\$text{$source}, $bug->{'-'}, $bug->{in});
    }
    die "$bug->{bug}: its old text is there " . scalar(@places) . " times, not once\n" if @places != 1;
    my $new = defined $bug->{'+'} ? $bug->{'+'} : '';
    mutant(@{ $places[0] }, $new, $bug->{bug}, $bug->{wants}, $bug->{'-'} =~ /[;}]\s*$/ ? 1 : 0);
}

# ---- writing -------------------------------------------------------------------------------------------------------

# Mutants that overlap are a group: one of them can be selected.
sub groups {
    my ($source) = @_;
    my @groups;
    for my $m (sort { $a->{begin} <=> $b->{begin} || $b->{end} <=> $a->{end} }
        grep { $_->{source} eq $source } @mutants) {
        my $last = $groups[-1];
        if ($last && $m->{begin} < $last->{end}) {
            push @{ $last->{mutants} }, $m;
            $last->{end} = $m->{end} if $m->{end} > $last->{end};
            $last->{statement} ||= $m->{statement};
        } else {
            push @groups, { begin => $m->{begin}, end => $m->{end}, statement => $m->{statement}, mutants => [$m] };
        }
    }
    return @groups;
}

# The text of a group: the old one, and for each mutant the old one with its part replaced.
sub selected {
    my ($source, $group) = @_;
    my $old = substr $text{$source}, $group->{begin}, $group->{end} - $group->{begin};
    my @branches;
    for my $m (@{ $group->{mutants} }) {
        my $new = $old;
        substr $new, $m->{begin} - $group->{begin}, $m->{end} - $m->{begin}, $m->{new};
        push @branches, [$m->{number}, $new];
    }
    return '{ ' . join('', map { "if (mutants_is($_->[0])) { $_->[1] } else " } @branches) . "{ $old } }"
        if $group->{statement};
    return '(' . join('', map { "mutants_is($_->[0]) ? $_->[1] : " } @branches) . "($old))";
}

sub quoted {
    my ($text) = @_;
    $text =~ s/(["\\])/\\$1/g;
    return "\"$text\"";
}

for (@sources) {
    $text{$_} = slurp($_);
    $masked{$_} = masked($text{$_});
    call_mutants($_);
    flag_mutants($_);
}
for my $list (@lists) {
    $kind = $list =~ m{/values[^/]*$} ? 'value' : 'call';
    list_mutant($_) for read_list($list, qw(bug in wants - +));
}
my $number = 0;
$_->{number} = ++$number for @mutants;
for my $source (@sources) {
    my $text = $text{$source};
    substr $text, $_->{begin}, $_->{end} - $_->{begin}, selected($source, $_) for reverse groups($source);
    my ($file) = $source =~ m{([^/]*)$};
    open my $out, '>', "$folder/$file" or die "$folder/$file: $!\n";
    print $out "int mutants_is(int number);\n", $text;
    close $out or die "$folder/$file: $!\n";
}
open my $out, '>', "$folder/mutants_list.h" or die "$folder/mutants_list.h: $!\n";
print $out "enum { MUTANTS_COUNT = $number };\nstatic const mutant mutants_list[MUTANTS_COUNT + 1] = {\n";
print $out '    {', join(', ', map { quoted($_) } @$_{qw(place title wants kind)}), "},\n" for @mutants;
print $out "    {0, 0, 0, 0},\n};\n";
close $out or die "$folder/mutants_list.h: $!\n";
