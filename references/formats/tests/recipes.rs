//! Recipes: golden values, a second implementation in Python, distributions, independence of streams.

use std::io::Write;
use std::process::{Command, Stdio};

use shardcheck_formats::{Counter, Distribution, Dtype, Overflow, Recipe, RecipeError, decode, encode, word};

fn recipe(distribution: Distribution, dtype: Dtype) -> Recipe {
    Recipe { seed: 1, stream: 0, distribution, dtype, shape: vec![1 << 20], exponent: 0 }
}

fn moments(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
    (mean, variance)
}

#[test]
fn the_first_words_are_the_golden_ones() {
    // computed by tests/recipe.py
    let golden = [
        (0, 0, [0x568A_9B0B_1A2C_05EC, 0x44E5_B8B1_47EF_718B, 0x4585_63AB_5552_1133, 0x33FE_8BD4_F9C5_7863]),
        (1, 0, [0x6EC8_5F1F_8547_BC0C, 0x6CF6_3AFC_C21A_470A, 0x8A27_B94C_FF75_26AA, 0x0A38_5EF2_4FA6_A992]),
        (
            42,
            7,
            [0xB22D_9C4F_9568_F550, 0xFC7C_6183_E6AD_2519, 0x4608_45F7_07E6_E7C0, 0x895E_3BB5_567A_A102u64],
        ),
    ];
    for (seed, stream, words) in golden {
        assert_eq!([0, 1, 2, u64::MAX].map(|index| word(seed, stream, index)), words);
    }
}

#[test]
fn the_first_values_are_the_golden_ones() {
    let golden: [(Distribution, f32, [i32; 6]); 4] = [
        (Distribution::Uniform, 8388608.0, [-1128353, -1247685, 665529, 5322583, -5567499, -5939979]),
        (Distribution::Gaussian, 65536.0, [10728, 28198, 96508, 72542, 79819, 27969]),
        (Distribution::HeavyTail, 65536.0, [21456, 82947, 40226, 79819, 29137, -84456]),
        (Distribution::Sign, 1.0, [1, 1, -1, -1, 1, 1]),
    ];
    for (distribution, steps, integers) in golden {
        let recipe = recipe(distribution, Dtype::F32);
        for (index, integer) in integers.into_iter().enumerate() {
            assert_eq!(recipe.value(index as u64), integer as f32 / steps, "{distribution} {index}");
        }
    }
    let codes: Vec<u64> = (0..4).map(|i| recipe(Distribution::Gaussian, Dtype::Bf16).bits(i)).collect();
    assert_eq!(codes, [0x3E28, 0x3EDC, 0x3FBC, 0x3F8E]);
}

/// Recipes over every distribution, dtype and several scales, from the normal range to overflow and underflow.
fn varied_recipes() -> Vec<Recipe> {
    let mut recipes = vec![];
    for distribution in Distribution::ALL {
        for dtype in Dtype::ALL {
            for (stream, exponent) in [(0, 0), (3, 5), (u32::MAX, -9), (17, 100), (18, -100)] {
                let seed = 0x1234_5678_9ABC_DEF0 ^ u64::from(stream) << 3;
                recipes.push(Recipe {
                    seed,
                    stream,
                    distribution,
                    dtype,
                    shape: vec![1 << 30, 1 << 20],
                    exponent,
                });
            }
        }
    }
    recipes
}

/// Feeds the Python implementation; `None` where there is no python3.
fn python_codes(input: &str) -> Option<Vec<Vec<u64>>> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recipe.py");
    let spawned =
        Command::new("python3").args(["-B", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => {
            eprintln!("SKIPPED: recipes against Python: python3: {error}");
            return None;
        }
    };
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "tests/recipe.py failed: {}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.lines().map(|line| line.split(' ').map(|code| code.parse().unwrap()).collect()).collect())
}

#[test]
fn a_second_implementation_in_python_gives_the_same_codes() {
    let recipes = varied_recipes();
    let mut counter = Counter::new(9, 9);
    let mut input = String::new();
    let mut cases = vec![];
    for recipe in &recipes {
        let indices: Vec<u64> = (0..4).chain((0..12).map(|_| counter.below(1 << 50))).collect();
        let line = serde_json::json!({ "recipe": recipe, "indices": indices });
        input += &format!("{line}\n");
        cases.push(indices);
    }
    let Some(python) = python_codes(&input) else { return };
    assert_eq!(python.len(), recipes.len());
    let mut compared = 0;
    for ((recipe, indices), codes) in recipes.iter().zip(&cases).zip(&python) {
        assert_eq!(indices.len(), codes.len());
        for (&index, &code) in indices.iter().zip(codes) {
            assert_eq!(recipe.bits(index), code, "{recipe:?} at {index}");
            compared += 1;
        }
    }
    assert_eq!(compared, 6 * 11 * 5 * 16);
}

#[test]
fn every_value_is_exactly_representable_in_its_dtype() {
    for recipe in varied_recipes() {
        for index in (0..200).chain([1 << 49]) {
            let (value, code) = (recipe.value(index), recipe.bits(index));
            assert!(value.is_finite(), "{recipe:?}");
            assert_eq!(decode(recipe.dtype, code) as f32, value, "{recipe:?}");
            if recipe.dtype.is_float() {
                assert_eq!(encode(recipe.dtype, f64::from(value), Overflow::NonFinite), code, "{recipe:?}");
            }
        }
    }
}

#[test]
fn tiles_made_in_any_order_are_the_same_tensor() {
    for recipe in varied_recipes().into_iter().step_by(7) {
        let mut whole = vec![0.0; 300];
        recipe.fill(1000, &mut whole);
        for start in [200usize, 0, 100] {
            let mut tile = vec![0.0; 100];
            recipe.fill(1000 + start as u64, &mut tile);
            assert_eq!(tile, whole[start..start + 100], "{recipe:?}");
        }
        assert_eq!(recipe.value(1234), whole[234]);
    }
}

#[test]
fn bytes_are_the_codes_in_little_endian_order() {
    for recipe in varied_recipes().into_iter().step_by(3) {
        let size = recipe.dtype.size_bytes();
        let bytes = recipe.bytes(77, 20);
        assert_eq!(bytes.len(), 20 * size);
        for (offset, chunk) in bytes.chunks_exact(size).enumerate() {
            assert_eq!(chunk, &recipe.bits(77 + offset as u64).to_le_bytes()[..size], "{recipe:?}");
        }
    }
}

#[test]
fn a_million_gaussian_values_have_mean_0_variance_1_and_light_tails() {
    let mut values = vec![0.0; 1_000_000];
    recipe(Distribution::Gaussian, Dtype::F32).fill(0, &mut values);
    let (mean, variance) = moments(&values);
    // five standard errors: 1/1000 for the mean, about sqrt(1.9)/1000 for the variance
    assert!(mean.abs() < 0.005, "{mean}");
    assert!((variance - 1.0).abs() < 0.007, "{variance}");
    let fourth = values.iter().map(|&x| f64::from(x).powi(4)).sum::<f64>() / 1e6;
    assert!((fourth - 2.9).abs() < 0.05, "the fourth moment of twelve uniforms is 2.9, not {fourth}");
    let beyond_2 = values.iter().filter(|x| x.abs() > 2.0).count() as f64 / 1e6;
    assert!((0.044..0.047).contains(&beyond_2), "{beyond_2}");
    assert!(values.iter().all(|x| x.abs() <= 6.0));
}

#[test]
fn a_million_values_of_the_other_distributions_have_their_stated_moments() {
    for (distribution, variance, tolerance) in [
        (Distribution::Uniform, 1.0 / 3.0, 0.002),
        (Distribution::HeavyTail, 4.75, 0.5),
        (Distribution::Sign, 1.0, 1e-4),
        (Distribution::Constant, 0.0, 0.0),
        (Distribution::Zero, 0.0, 0.0),
    ] {
        let mut values = vec![0.0; 1_000_000];
        recipe(distribution, Dtype::F32).fill(0, &mut values);
        let (mean, measured) = moments(&values);
        let expected_mean = if distribution == Distribution::Constant { 1.0 } else { 0.0 };
        assert!((mean - expected_mean).abs() <= 0.005 * f64::sqrt(variance), "{distribution} {mean}");
        assert!((measured - variance).abs() <= tolerance, "{distribution} {measured}");
    }
}

#[test]
fn the_heavy_tail_doubles_with_probability_a_quarter_up_to_five_times() {
    let mut values = vec![0.0; 1 << 20];
    recipe(Distribution::HeavyTail, Dtype::F32).fill(0, &mut values);
    let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    assert!((48.0..=192.0).contains(&largest), "{largest}");
    // beyond the reach of a single Gaussian: at least one doubling was applied
    let beyond_6 = values.iter().filter(|x| x.abs() > 6.0).count() as f64 / values.len() as f64;
    assert!((0.010..0.020).contains(&beyond_6), "{beyond_6}");
}

#[test]
fn streams_seeds_and_neighbouring_elements_are_uncorrelated() {
    let series = |seed, stream, start| {
        let recipe = Recipe { seed, stream, ..recipe(Distribution::Gaussian, Dtype::F32) };
        let mut values = vec![0.0; 100_000];
        recipe.fill(start, &mut values);
        values
    };
    let base = series(1, 0, 0);
    for other in [series(1, 1, 0), series(2, 0, 0), series(1, 0, 1), series(1, 0, 576), series(1, 1 << 31, 0)]
    {
        assert_ne!(base, other);
        let products = base.iter().zip(&other).map(|(&a, &b)| f64::from(a) * f64::from(b));
        let correlation = products.sum::<f64>() / 100_000.0;
        assert!(correlation.abs() < 5.0 / 100_000f64.sqrt(), "{correlation}");
    }
}

#[test]
fn no_word_of_sixteen_streams_occurs_twice() {
    let mut words: Vec<u64> = vec![];
    for seed in 0..4 {
        for stream in 0..4 {
            words.extend((0..20_000).map(|index| word(seed, stream, index)));
        }
    }
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), 16 * 20_000);
}

#[test]
fn every_bit_of_a_word_is_set_half_of_the_time() {
    let mut counts = [0u32; 64];
    for index in 0..100_000 {
        let word = word(3, 1, index);
        for bit in 0..64 {
            counts[bit] += (word >> bit & 1) as u32;
        }
    }
    for (bit, count) in counts.into_iter().enumerate() {
        assert!((49_200..50_800).contains(&count), "bit {bit}: {count}");
    }
}

#[test]
fn the_exponent_scales_by_a_power_of_two_and_changes_no_digit() {
    let unit = recipe(Distribution::Gaussian, Dtype::Bf16);
    for exponent in [-100, -7, 3, 100] {
        let scaled = Recipe { exponent, ..unit.clone() };
        for index in 0..1000 {
            assert_eq!(f64::from(scaled.value(index)), f64::from(unit.value(index)) * 2f64.powi(exponent));
        }
    }
}

#[test]
fn fp8_values_beyond_the_largest_finite_one_saturate() {
    for dtype in [Dtype::E4m3fn, Dtype::E4m3fnuz, Dtype::E5m2] {
        let recipe = Recipe { exponent: 40, ..recipe(Distribution::Sign, dtype) };
        for index in 0..100 {
            assert_eq!(f64::from(recipe.value(index).abs()), dtype.max_finite(), "{dtype}");
        }
    }
}

#[test]
fn an_unusable_recipe_is_refused_with_a_reason() {
    let good = recipe(Distribution::Uniform, Dtype::Bf16);
    assert_eq!(good.check(), Ok(()));
    for exponent in [101, -101, i32::MIN] {
        let bad = Recipe { exponent, ..good.clone() };
        assert_eq!(bad.check(), Err(RecipeError::Exponent { exponent }));
        assert!(bad.check().unwrap_err().to_string().contains("within 2^±100"));
    }
    let huge = Recipe { shape: vec![usize::MAX, 2], ..good.clone() };
    assert!(matches!(huge.check(), Err(RecipeError::Shape { .. })));
    let empty = Recipe { shape: vec![usize::MAX, 2, 0], ..good.clone() };
    assert_eq!((empty.check(), empty.len(), empty.is_empty()), (Ok(()), 0, true));
    assert_eq!(Recipe { shape: vec![], ..good }.len(), 1);
}

#[test]
#[should_panic(expected = "pass the end of a tensor")]
fn reading_past_the_end_of_a_tensor_is_a_bug() {
    let recipe = Recipe { shape: vec![3, 4], ..recipe(Distribution::Uniform, Dtype::Bf16) };
    recipe.fill(10, &mut [0.0; 3]);
}

#[test]
fn a_recipe_survives_json_and_refuses_unknown_fields() {
    for recipe in varied_recipes() {
        let json = serde_json::to_string(&recipe).unwrap();
        assert_eq!(serde_json::from_str::<Recipe>(&json).unwrap(), recipe);
    }
    let json =
        r#"{"seed":1,"stream":2,"distribution":"gaussian","dtype":"bf16","shape":[2,3],"exponent":-1}"#;
    assert_eq!(serde_json::from_str::<Recipe>(json).unwrap().len(), 6);
    assert!(serde_json::from_str::<Recipe>(&json.replace("exponent", "scale")).is_err());
}

#[test]
fn a_counter_reads_the_words_of_its_stream_in_order() {
    let mut counter = Counter::new(77, 5);
    for index in 0..100 {
        assert_eq!(counter.next_u64(), word(77, 5, index));
    }
    let gaussian = Recipe { seed: 77, stream: 5, ..recipe(Distribution::Gaussian, Dtype::F32) };
    let mut counter = Counter::new(77, 5);
    for index in 0..100 {
        assert_eq!(counter.gaussian(), f64::from(gaussian.value(index)));
    }
}

#[test]
fn a_counter_draws_below_n_evenly_and_units_below_one() {
    let mut counter = Counter::new(1, 1);
    let mut counts = [0u32; 7];
    for _ in 0..70_000 {
        counts[counter.below(7) as usize] += 1;
    }
    assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
    assert_eq!(counter.below(1), 0);
    let mean =
        (0..10_000).map(|_| counter.unit_f64()).inspect(|x| assert!((0.0..1.0).contains(x))).sum::<f64>()
            / 1e4;
    assert!((mean - 0.5).abs() < 0.015, "{mean}");
}

#[test]
#[should_panic(expected = "no integer below 0")]
fn drawing_below_zero_is_a_bug() {
    Counter::new(0, 0).below(0);
}
