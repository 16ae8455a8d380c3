//! t-way covering arrays under constraints: few rows that show every combination of any t axes.
//!
//! A fault that needs t settings at once is met by a strength-t array whatever the other settings are, and an array grows with the
//! logarithm of the number of axes where the full product explodes. Rows are made greedily, one at a time, from a combination
//! that is still missing (in the manner of AETG: Cohen, Dalal, Fredman and Patton 1997).

use shardcheck_formats::Counter;

use crate::stream::Stream;

/// Whether a partial row may still be valid: entries are value indices, `None` where nothing is chosen. It must not refuse a row
/// for what is not chosen yet, and must refuse every full row that is not valid.
pub type Constraint<'a> = dyn Fn(&[Option<usize>]) -> bool + 'a;

/// Rows such that each valid combination of values of any `strength` axes stands in one of them. `levels[a]` is the number of
/// values of axis `a`. Equal arguments give equal rows.
///
/// Constrained axes should come first: rows are filled in the order of the axes, and a dead end is found the sooner.
///
/// # Panics
/// When `strength` is 0 or exceeds the number of axes, or an axis has no value.
pub fn covering(levels: &[usize], strength: usize, valid: &Constraint, seed: u64) -> Vec<Vec<usize>> {
    assert!(strength >= 1 && strength <= levels.len(), "strength {strength} over {} axes", levels.len());
    assert!(levels.iter().all(|count| *count > 0), "every axis needs a value");
    let mut search = Search {
        levels,
        valid,
        missing: Missing::new(levels, strength),
        counter: Stream::Covering.counter(seed),
    };
    let mut rows = Vec::new();
    while let Some(combination) = search.missing.first() {
        let mut row = vec![None; levels.len()];
        for (axis, value) in &combination {
            row[*axis] = Some(*value);
        }
        if (search.valid)(&row) && search.complete(&mut row, 0) {
            let row: Vec<usize> =
                row.into_iter().map(|value| value.expect("a complete row has every value")).collect();
            search.missing.strike(&row);
            rows.push(row);
        } else {
            search.missing.strike_one(&combination);
        }
    }
    rows
}

/// Completes a partial row to a valid one, if it can be: the definition of a valid combination.
pub fn is_possible(levels: &[usize], valid: &Constraint, row: &[Option<usize>]) -> bool {
    fn descend(levels: &[usize], valid: &Constraint, row: &mut [Option<usize>], axis: usize) -> bool {
        if axis == levels.len() {
            return true;
        }
        if row[axis].is_some() {
            return descend(levels, valid, row, axis + 1);
        }
        for value in 0..levels[axis] {
            row[axis] = Some(value);
            if valid(row) && descend(levels, valid, row, axis + 1) {
                return true;
            }
        }
        row[axis] = None;
        false
    }
    valid(row) && descend(levels, valid, &mut row.to_vec(), 0)
}

struct Search<'a> {
    levels: &'a [usize],
    valid: &'a Constraint<'a>,
    missing: Missing,
    counter: Counter,
}

impl Search<'_> {
    /// Fills the open axes from `axis` on, most missing combinations first, stepping back from dead ends.
    fn complete(&mut self, row: &mut Vec<Option<usize>>, axis: usize) -> bool {
        if axis == self.levels.len() {
            return true;
        }
        if row[axis].is_some() {
            return self.complete(row, axis + 1);
        }
        let mut values: Vec<(usize, u64, usize)> = (0..self.levels[axis])
            .map(|value| (self.missing.gain(row, axis, value), self.counter.next_u64(), value))
            .collect();
        values.sort_unstable_by(|a, b| b.cmp(a));
        for (_, _, value) in values {
            row[axis] = Some(value);
            if (self.valid)(row) && self.complete(row, axis + 1) {
                return true;
            }
        }
        row[axis] = None;
        false
    }
}

/// Combinations of `strength` axes that no row shows yet.
struct Missing {
    levels: Vec<usize>,
    /// Each choice of axes, ascending, with the index of its first combination in `open`.
    choices: Vec<(Vec<usize>, usize)>,
    /// Index into `choices` of all choices that an axis takes part in.
    by_axis: Vec<Vec<usize>>,
    open: Vec<bool>,
    /// No combination before this one is open.
    next: usize,
}

impl Missing {
    fn new(levels: &[usize], strength: usize) -> Self {
        let mut choices = Vec::new();
        let mut by_axis = vec![Vec::new(); levels.len()];
        let mut size = 0;
        let mut axes: Vec<usize> = (0..strength).collect();
        loop {
            for axis in &axes {
                by_axis[*axis].push(choices.len());
            }
            choices.push((axes.clone(), size));
            size += axes.iter().map(|axis| levels[*axis]).product::<usize>();
            // next choice in lexicographic order
            let Some(place) =
                (0..strength).rev().find(|place| axes[*place] < levels.len() - strength + place)
            else {
                break;
            };
            axes[place] += 1;
            for later in place + 1..strength {
                axes[later] = axes[later - 1] + 1;
            }
        }
        Self { levels: levels.to_vec(), choices, by_axis, open: vec![true; size], next: 0 }
    }

    /// The first open combination, as axes and values.
    fn first(&mut self) -> Option<Vec<(usize, usize)>> {
        self.next += self.open[self.next..].iter().position(|open| *open)?;
        let choice = self.choices.partition_point(|(_, start)| *start <= self.next) - 1;
        let (axes, start) = &self.choices[choice];
        let mut rest = self.next - start;
        let mut combination: Vec<(usize, usize)> = axes
            .iter()
            .rev()
            .map(|axis| {
                let value = rest % self.levels[*axis];
                rest /= self.levels[*axis];
                (*axis, value)
            })
            .collect();
        combination.reverse();
        Some(combination)
    }

    /// Index of a choice's combination in a row; `None` while one of its axes is open.
    fn index(&self, choice: usize, value_of: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let (axes, start) = &self.choices[choice];
        let mut index = 0;
        for axis in axes {
            index = index * self.levels[*axis] + value_of(*axis)?;
        }
        Some(start + index)
    }

    /// Open combinations that `value` at `axis` would show, given what the row has already.
    fn gain(&self, row: &[Option<usize>], axis: usize, value: usize) -> usize {
        let value_of = |other: usize| if other == axis { Some(value) } else { row[other] };
        self.by_axis[axis]
            .iter()
            .filter(|choice| self.index(**choice, value_of).is_some_and(|index| self.open[index]))
            .count()
    }

    fn strike(&mut self, row: &[usize]) {
        for choice in 0..self.choices.len() {
            if let Some(index) = self.index(choice, |axis| Some(row[axis])) {
                self.open[index] = false;
            }
        }
    }

    fn strike_one(&mut self, combination: &[(usize, usize)]) {
        let value_of =
            |axis: usize| combination.iter().find(|(other, _)| *other == axis).map(|(_, value)| *value);
        for choice in 0..self.choices.len() {
            if let Some(index) = self.index(choice, value_of) {
                self.open[index] = false;
            }
        }
    }
}

/// Checks, by another way than the search, that every combination which a valid row can have stands in one of `rows`, and that
/// no row breaks a constraint. Returns the number of combinations that are possible.
#[cfg(test)]
pub(crate) fn prove(levels: &[usize], strength: usize, valid: &Constraint, rows: &[Vec<usize>]) -> usize {
    fn combinations(
        levels: &[usize],
        strength: usize,
        from: usize,
        so_far: &mut Vec<usize>,
        found: &mut Vec<Vec<usize>>,
    ) {
        if so_far.len() == strength {
            return found.push(so_far.clone());
        }
        for axis in from..levels.len() {
            so_far.push(axis);
            combinations(levels, strength, axis + 1, so_far, found);
            so_far.pop();
        }
    }
    let mut choices = Vec::new();
    combinations(levels, strength, 0, &mut Vec::new(), &mut choices);
    for row in rows {
        assert!(valid(&row.iter().map(|value| Some(*value)).collect::<Vec<_>>()), "row {row:?} is not valid");
    }
    let mut possible = 0;
    for axes in choices {
        let shown: std::collections::HashSet<Vec<usize>> =
            rows.iter().map(|row| axes.iter().map(|axis| row[*axis]).collect()).collect();
        possible += shown.len();
        let count: usize = axes.iter().map(|axis| levels[*axis]).product();
        for mut index in 0..count {
            let mut row = vec![None; levels.len()];
            let values: Vec<usize> = axes
                .iter()
                .map(|axis| {
                    let value = index % levels[*axis];
                    index /= levels[*axis];
                    row[*axis] = Some(value);
                    value
                })
                .collect();
            if !shown.contains(&values) {
                assert!(!is_possible(levels, valid, &row), "{row:?} is possible and not covered");
            }
        }
    }
    possible
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_and_every_triple_of_a_free_product_is_covered() {
        let levels = [3, 4, 2, 5, 3, 2];
        for strength in [1, 2, 3] {
            let rows = covering(&levels, strength, &|_| true, 1);
            prove(&levels, strength, &|_| true, &rows);
            assert!(rows.len() < levels.iter().product::<usize>() / 4, "{} rows", rows.len());
        }
    }

    #[test]
    fn under_constraints_every_combination_that_is_possible_is_covered_and_no_row_breaks_one() {
        let levels = [4, 4, 3, 3];
        // axis 0 below axis 1; where axis 2 is 0, axis 3 is 0
        let valid = |row: &[Option<usize>]| {
            !matches!((row[0], row[1]), (Some(a), Some(b)) if a >= b)
                && !matches!((row[2], row[3]), (Some(0), Some(d)) if d != 0)
        };
        for strength in [2, 3] {
            let rows = covering(&levels, strength, &valid, 3);
            let covered = prove(&levels, strength, &valid, &rows);
            let all = [0, 0, 73, 168][strength];
            assert!(covered > 0 && covered < all, "{covered} of {all}");
        }
    }

    #[test]
    fn a_hidden_contradiction_of_three_axes_is_stepped_around() {
        // no two of the axes contradict each other, all three do
        let valid = |row: &[Option<usize>]| !matches!((row[0], row[1], row[2]), (Some(a), Some(b), Some(c)) if (a + b + c) % 2 == 1);
        let rows = covering(&[2, 2, 2, 3], 2, &valid, 9);
        assert_eq!(prove(&[2, 2, 2, 3], 2, &valid, &rows), 12 + 18);
    }

    #[test]
    fn full_strength_is_the_whole_valid_product() {
        let valid = |row: &[Option<usize>]| !matches!((row[0], row[1]), (Some(1), Some(1)));
        assert_eq!(covering(&[2, 2, 2], 3, &valid, 0).len(), 6);
    }

    #[test]
    fn the_same_seed_gives_the_same_rows_and_another_seed_others() {
        let levels = [4, 4, 4, 4];
        assert_eq!(covering(&levels, 2, &|_| true, 5), covering(&levels, 2, &|_| true, 5));
        assert_ne!(covering(&levels, 2, &|_| true, 5), covering(&levels, 2, &|_| true, 6));
    }

    #[test]
    #[should_panic(expected = "strength 3 over 2 axes")]
    fn more_strength_than_axes_is_a_bug_of_the_caller() {
        covering(&[2, 2], 3, &|_| true, 0);
    }
}
