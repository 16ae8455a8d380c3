//! Layers that share a selection (IndexShare): by whose selection each layer attends.
//!
//! ATOM `_should_skip_index_topk`: shared where selections are kept, or the period is above 1; types, else a pattern, else the period from
//! an offset on. vLLM (`DeepseekV32`, `deepseek_v2.py`): a pattern, else the period, whose offset counts from 1. A layer behind the end of
//! what is listed computes, and so does every draft layer.

/// How a period and an offset are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// Layer l computes where max(l − offset, 0) is a multiple of the period; 1 without an offset. Nobody shares where selections are not
    /// kept and the period is 1.
    Atom,
    /// Layer l computes where max(l + 1 − offset, 0) is a multiple of the period; 2 without an offset. Types are not read.
    Vllm,
}

/// What a configuration says.
#[derive(Debug, Clone, Copy)]
pub struct Sharing<'a> {
    /// How it is read.
    pub reading: Reading,
    /// Layers of the model, and of its drafts.
    pub layers: (usize, usize),
    /// Whether it asks for selections to be kept.
    pub kept: bool,
    /// Period, 1 and more, and offset.
    pub period: (usize, Option<usize>),
    /// For each layer of a list whether it shares: the pattern.
    pub pattern: Option<&'a [bool]>,
    /// The same by types.
    pub types: Option<&'a [bool]>,
}

impl Sharing<'_> {
    /// Whether a layer attends by the selection of another one.
    pub fn shares(&self, layer: usize) -> bool {
        let (period, offset) = self.period;
        let of_atom = self.reading == Reading::Atom;
        let listed = if of_atom { self.types.or(self.pattern) } else { self.pattern };
        if layer >= self.layers.0 || (of_atom && !self.kept && period == 1) {
            return false;
        }
        match listed {
            Some(listed) => listed.get(layer) == Some(&true),
            None if of_atom => layer.saturating_sub(offset.unwrap_or(1)) % period != 0,
            None => (layer + 1).saturating_sub(offset.unwrap_or(2)) % period != 0,
        }
    }

    /// For each layer the one by whose selection it attends: itself, or the last one before it that does not share. `None` where there is
    /// no such layer.
    pub fn sources(&self) -> Vec<Option<usize>> {
        let mut last = None;
        let source = |layer: usize| {
            if !self.shares(layer) {
                last = Some(layer);
            }
            last
        };
        (0..self.layers.0 + self.layers.1).map(source).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(letters: &str) -> Vec<bool> {
        letters.chars().map(|letter| letter == 'S').collect()
    }

    fn plain(reading: Reading, layers: (usize, usize), period: (usize, Option<usize>)) -> Sharing<'static> {
        Sharing { reading, layers, kept: false, period, pattern: None, types: None }
    }

    fn letters(sharing: &Sharing<'_>) -> String {
        (0..sharing.layers.0 + sharing.layers.1).map(|l| if sharing.shares(l) { 'S' } else { 'F' }).collect()
    }

    #[test]
    fn the_published_schedule_of_glm_is_what_vllm_reads_and_one_layer_off_what_atom_reads_of_a_period() {
        // GLM-5.2 and 5.3: period 4, offset 3; its types are listed as FFF, then SSSF again and again
        let published = "FFFSSSFSSSFSSSFSSSF";
        assert_eq!(letters(&plain(Reading::Vllm, (19, 0), (4, Some(3)))), published);
        assert_eq!(letters(&plain(Reading::Atom, (19, 0), (4, Some(3)))), "FFFFSSSFSSSFSSSFSSS");
        let types = listed(published);
        let by_types = Sharing { types: Some(&types), ..plain(Reading::Atom, (19, 0), (4, Some(3))) };
        assert_eq!(letters(&by_types), published);
    }

    #[test]
    fn both_read_a_period_without_an_offset_alike() {
        for period in 1..=5 {
            let [atom, vllm] =
                [Reading::Atom, Reading::Vllm].map(|r| letters(&plain(r, (17, 2), (period, None))));
            assert_eq!(atom, vllm, "{period}");
        }
        assert_eq!(letters(&plain(Reading::Atom, (8, 2), (3, None))), "FFSSFSSFFF");
    }

    #[test]
    fn types_go_before_a_pattern_and_a_pattern_before_the_period_and_short_lists_leave_the_rest_full() {
        let (types, pattern) = (listed("FSFS"), listed("FFSS"));
        let all = Sharing {
            pattern: Some(&pattern),
            types: Some(&types),
            ..plain(Reading::Atom, (6, 1), (2, Some(0)))
        };
        assert_eq!(letters(&all), "FSFSFFF");
        assert_eq!(letters(&Sharing { types: None, ..all }), "FFSSFFF");
        assert_eq!(letters(&Sharing { reading: Reading::Vllm, ..all }), "FFSSFFF", "types are not read");
    }

    #[test]
    fn atom_shares_only_where_selections_are_kept_or_the_period_asks_for_it() {
        let pattern = listed("FSS");
        let asked = Sharing { pattern: Some(&pattern), ..plain(Reading::Atom, (3, 0), (1, None)) };
        assert_eq!(letters(&asked), "FFF");
        assert_eq!(letters(&Sharing { kept: true, ..asked }), "FSS");
        assert_eq!(letters(&Sharing { period: (2, None), ..asked }), "FSS");
        assert_eq!(letters(&Sharing { reading: Reading::Vllm, ..asked }), "FSS");
    }

    /// Walks the layers and counts down to the next one that computes, as the sentence of a model card has it.
    fn walked(layers: usize, period: usize, first: usize) -> String {
        let mut left = 0;
        let layer = |layer: usize| {
            if layer <= first || left == 0 {
                left = period - 1;
                return 'F';
            }
            left -= 1;
            'S'
        };
        (0..layers).map(layer).collect()
    }

    #[test]
    fn a_period_is_what_counting_layers_down_gives() {
        for period in 1..=6 {
            for offset in 0..=7 {
                let atom = letters(&plain(Reading::Atom, (24, 0), (period, Some(offset))));
                assert_eq!(atom, walked(24, period, offset), "{period} {offset}");
                if offset > 0 {
                    let vllm = letters(&plain(Reading::Vllm, (24, 0), (period, Some(offset))));
                    assert_eq!(vllm, walked(24, period, offset - 1), "{period} {offset}");
                }
            }
        }
    }

    #[test]
    fn a_source_is_the_last_layer_that_computes_and_never_one_behind() {
        let pattern = listed("FSSFS");
        let sharing = Sharing { pattern: Some(&pattern), ..plain(Reading::Vllm, (6, 2), (1, None)) };
        assert_eq!(sharing.sources(), [0, 0, 0, 3, 3, 5, 6, 7].map(Some));
        let nobody = listed("SF");
        let headless = Sharing { pattern: Some(&nobody), ..plain(Reading::Vllm, (2, 0), (1, None)) };
        assert_eq!(headless.sources(), [None, Some(1)]);
    }
}
