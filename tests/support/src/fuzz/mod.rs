//! A fuzz loop: changes inputs at random and checks each result.

mod values;

use std::{
    collections::HashSet,
    env,
    fmt::Debug,
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::Duration,
};

use fastrand::Rng;

/// Long enough to show that the loop works; `.ci/run` sets a longer time.
const SECONDS: f64 = 1.0;
/// The most inputs with a new outcome that are kept in addition to the corpus.
const FOUND_MAX: usize = 2_000;
/// The number of inputs between two readings of the clock.
const ROUND: usize = 64;

/// The maximum length of an input.
const LENGTH_MAX: usize = 4096;

/// Limits of number types, and separators of fields and of the parts of URLs.
const PIECES: [&[u8]; 28] = [
    b"0",
    b"-1",
    b"1",
    b"9007199254740991",
    b"9007199254740992",
    b"9223372036854775807",
    b"18446744073709551615",
    b"18446744073709551616",
    b"99999999999999999999999999",
    b"-9223372036854775808",
    b"1e3",
    b"+7",
    b" ",
    b"  ",
    b"\r\n",
    b"\n",
    b"\0",
    b"\x1b[31m",
    b"\xff",
    "\u{202e}é".as_bytes(),
    b"|",
    b"{",
    b"}",
    b"distlock:",
    b"://",
    b",redis://",
    b"@",
    b":",
];

/// An input that can be changed at random in such a way that it usually still resembles the
/// original.
pub trait Input: Clone + Debug {
    /// Makes one change, which may copy a part of `other`.
    fn change(&mut self, dice: &mut Rng, other: &Self);
}

impl Input for Vec<u8> {
    fn change(&mut self, dice: &mut Rng, other: &Vec<u8>) {
        let at = dice.usize(..=self.len());
        let end = at + dice.usize(..=(self.len() - at).min(16));
        match dice.u8(..8) {
            0 if at < self.len() => self[at] ^= 1 << dice.u8(..8),
            1 if at < self.len() => self[at] = dice.u8(..),
            2 => drop(self.drain(at..end)),
            3 => {
                let again = self[at..end].to_vec();
                self.splice(at..at, again);
            }
            4 => {
                let piece = PIECES[dice.usize(..PIECES.len())];
                self.splice(at..end, piece.iter().copied());
            }
            5 => {
                // Replaces a whole number.
                let is_digit = |byte: &u8| byte.is_ascii_digit();
                if let Some(begin) = self[at..].iter().position(is_digit).map(|begin| at + begin) {
                    let length = self[begin..].iter().take_while(|byte| is_digit(byte)).count();
                    let piece = PIECES[dice.usize(..12)];
                    self.splice(begin..begin + length, piece.iter().copied());
                }
            }
            6 => {
                let from = dice.usize(..=other.len());
                let to = from + dice.usize(..=other.len() - from);
                self.splice(at..end, other[from..to].iter().copied());
            }
            _ => self.truncate(at),
        }
        self.truncate(LENGTH_MAX);
    }
}

/// Reads the files of a folder; each is one input.
pub fn read_corpus(folder: &Path) -> Vec<Vec<u8>> {
    let files =
        fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Calls `check` with the inputs and with random changes of them.
///
/// `check` panics if something is wrong, and otherwise returns a number for the kind of outcome;
/// inputs with a new kind are changed further. `clock` returns the time since any fixed point.
pub fn fuzz<I: Input>(clock: impl Fn() -> Duration, mut inputs: Vec<I>, check: impl Fn(&I) -> u64) {
    let setting = |name| env::var(name).ok().and_then(|text: String| text.parse::<f64>().ok());
    let seconds = setting("DISTLOCK_FUZZ_SECONDS").unwrap_or(SECONDS);
    let seed = env::var("DISTLOCK_FUZZ_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| fastrand::u64(..));
    let until = clock().saturating_add(Duration::from_secs_f64(seconds));
    let checked = |input: &I| {
        catch_unwind(AssertUnwindSafe(|| check(input))).unwrap_or_else(|_| {
            panic!("an input failed with DISTLOCK_FUZZ_SEED={seed}:\n{input:?}")
        })
    };
    let mut seen: HashSet<u64> = inputs.iter().map(checked).collect();
    let (mut dice, real) = (Rng::with_seed(seed), inputs.len());
    let mut tried = 0_u64;
    while tried == 0 || clock() < until {
        for _ in 0..ROUND {
            let mut input = inputs[dice.usize(..inputs.len())].clone();
            for _ in 0..=dice.usize(..4) {
                let other = &inputs[dice.usize(..inputs.len())];
                input.change(&mut dice, other);
            }
            if seen.insert(checked(&input)) && inputs.len() < real + FOUND_MAX {
                inputs.push(input);
            }
        }
        tried += ROUND as u64;
    }
    // Shown only with `--nocapture`.
    eprintln!("{tried} inputs, {} outcomes, seed {seed}", seen.len());
}
