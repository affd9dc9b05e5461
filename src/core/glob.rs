//! Redis patterns, as `SCAN MATCH` has them.

/// Whether `text` matches the pattern: `*` any bytes, `?` one byte, `[a-c]` or `[^a-c]` one of or
/// none of these bytes, `\` the next byte itself.
pub(crate) fn matches(mut pattern: &[u8], mut text: &[u8]) -> bool {
    // The last `*`, and what has been tried to match after it.
    let mut star: Option<(&[u8], &[u8])> = None;
    loop {
        match one(pattern, text) {
            Step::Star(rest) => {
                star = Some((rest, text));
                pattern = rest;
            }
            Step::Matched(rest) => (pattern, text) = (rest, &text[1..]),
            Step::End => return true,
            Step::Differs => match star {
                Some((rest, [_, shorter @ ..])) => {
                    star = Some((rest, shorter));
                    (pattern, text) = (rest, shorter);
                }
                _ => return false,
            },
        }
    }
}

enum Step<'a> {
    /// A `*`, and the pattern after it.
    Star(&'a [u8]),
    /// The first byte matches; the pattern after it.
    Matched(&'a [u8]),
    Differs,
    /// Pattern and text end here.
    End,
}

/// Compares one byte.
fn one<'a>(pattern: &'a [u8], text: &[u8]) -> Step<'a> {
    let Some(byte) = text.first() else {
        return match pattern {
            [b'*', rest @ ..] => Step::Star(rest),
            [] => Step::End,
            _ => Step::Differs,
        };
    };
    let (is_match, rest) = match pattern {
        [b'*', rest @ ..] => return Step::Star(rest),
        [b'?', rest @ ..] => (true, rest),
        [b'[', rest @ ..] => in_class(rest, *byte),
        [b'\\', literal, rest @ ..] | [literal, rest @ ..] => (literal == byte, rest),
        [] => return Step::Differs,
    };
    if is_match { Step::Matched(rest) } else { Step::Differs }
}

/// Whether the class that begins here has this byte, and the pattern after the class.
fn in_class(class: &[u8], byte: u8) -> (bool, &[u8]) {
    let (negated, mut rest) = match class {
        [b'^', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut found = false;
    loop {
        rest = match rest {
            [] => return (found != negated, rest),
            [b']', rest @ ..] => return (found != negated, rest),
            [b'\\', literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
            [first, b'-', last, rest @ ..] => {
                found |= (*first.min(last)..=*first.max(last)).contains(&byte);
                rest
            }
            [literal, rest @ ..] => {
                found |= *literal == byte;
                rest
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_on_a_server() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("lock:*", "lock:", true),
            ("lock:*", "lock:orders:42", true),
            ("lock:*", "loc", false),
            ("*a*b", "xaxbxab", true),
            ("*a*b", "xaxbxa", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[c-a]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("[^a-c]x", "dx", true),
            ("[^a-c]x", "ax", false),
            ("[ab", "b", true),
            ("[\\]]", "]", true),
            ("\\*a", "*a", true),
            ("\\*a", "ba", false),
            ("a\\", "a\\", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
