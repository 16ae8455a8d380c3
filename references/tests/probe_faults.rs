//! Every token of a row dropped and doubled, pages, ranks and pairs lost: none is missed, and what was lost is named.

mod probing;

use probing::{Setting, Tried};
use shardcheck_formats::contract::Merge;
use shardcheck_formats::dtype::Dtype;
use shardcheck_references::probe::KeySelect;

fn all_named(tried: Tried, count: usize, what: &str) {
    assert!(tried.tried >= count, "{what}: only {} tried", tried.tried);
    assert_eq!((tried.missed, tried.named), (0, tried.tried), "{what}: {tried:?}");
}

#[test]
fn every_token_of_four_thousand_is_named_when_it_is_lost_or_doubled() {
    for (world, interleave) in [(1, 1), (3, 1), (4, 16), (6, 1), (8, 1), (8, 16)] {
        for merge in [Merge::A2a, Merge::AgRsBf16] {
            let setting = Setting::new((world, interleave, 16), 4096, merge, &[]);
            assert!(setting.clean_is_silent());
            for times in [-1, 1] {
                let what = format!("W={world} S={interleave} {merge} {times:+}");
                all_named(setting.every_token(times), 4096, &what);
            }
        }
    }
}

#[test]
fn every_token_of_a_length_that_nothing_divides_is_named() {
    for (world, interleave, merge) in
        [(1, 1, Merge::A2a), (3, 1, Merge::AgRsBf16), (6, 1, Merge::A2a), (8, 16, Merge::AgRsBf16)]
    {
        let setting = Setting::new((world, interleave, 16), 32_771, merge, &[]);
        assert!(setting.clean_is_silent());
        for times in [-1, 1] {
            all_named(
                setting.every_token(times),
                32_771,
                &format!("W={world} S={interleave} {merge} {times:+}"),
            );
        }
    }
}

#[test]
fn lost_pages_of_all_ranks_or_one_are_named_whole_or_not() {
    for (world, block, merge) in
        [(8, 16, Merge::A2a), (3, 64, Merge::AgRsBf16), (1, 128, Merge::A2a), (6, 96, Merge::A2a)]
    {
        let setting = Setting::new((world, 1, block), 4099, merge, &[]);
        let tried = setting.pages_lost(60);
        assert_eq!(tried.missed, 0, "W={world} B={block}");
        assert!(tried.named * 20 >= tried.tried * 19, "W={world} B={block}: {tried:?}");
    }
}

#[test]
fn aliased_pages_and_overwritten_rows_are_noticed() {
    for (world, block, merge) in [(8, 16, Merge::A2a), (3, 64, Merge::AgRsBf16), (2, 128, Merge::A2a)] {
        let setting = Setting::new((world, 1, block), 4099, merge, &[]);
        assert!(setting.pages_hide_in(1), "pages sum to zero in the signs of tokens");
        assert_eq!(setting.pages_aliased(60).missed, 0, "W={world} B={block}");
        assert_eq!(setting.rows_overwritten(60, false).missed, 0, "W={world} B={block}");
        all_named(setting.rows_overwritten(60, true), 50, &format!("W={world} B={block}"));
    }
}

#[test]
fn a_missing_rank_is_named_whatever_the_world_size() {
    for (world, merge) in [(2, Merge::A2a), (3, Merge::AgRsBf16), (8, Merge::AgRsBf16), (16, Merge::A2a)] {
        let setting = Setting::new((world, 1, 16), 4099, merge, &[]);
        all_named(setting.ranks_missing(50), 50, &format!("W={world} {merge}"));
    }
}

#[test]
fn keys_that_go_with_other_values_show_under_the_selectors_alone() {
    for (world, merge) in [(1, Merge::A2a), (3, Merge::AgRsBf16), (8, Merge::A2a)] {
        let setting = Setting::new((world, 1, 16), 4099, merge, &[]);
        let select = KeySelect::new(setting.code.token_bits(), 8, Dtype::Bf16, 1.0, 0.1).unwrap();
        all_named(setting.mispaired(&select, 50), 50, &format!("W={world} {merge}"));
    }
}

#[test]
fn tolerances_leave_room_for_one_token() {
    for world in [1, 2, 3, 4, 5, 6, 7, 8] {
        for merge in Merge::ALL {
            let setting = Setting::new((world, 1, 16), 4096, merge, &[]);
            assert!(setting.tolerance() < 0.5, "W={world} {merge}: {}", setting.tolerance());
        }
    }
}
