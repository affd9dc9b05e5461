//! Checks patterns of names. Pure.

/// Returns why no name can match the pattern; `None` if some can.
pub(crate) fn why_no_match(pattern: &str) -> Option<&'static str> {
    if pattern.is_empty() {
        return Some("it is empty; * matches all names");
    }
    let mut rest = pattern.as_bytes();
    loop {
        rest = match rest {
            [] => return None,
            [b'\\', _, rest @ ..] => rest,
            [b'[', class @ ..] => match after_class(class) {
                None => return Some("a [ has no closing ]; write \\[ for a [ in a name"),
                Some(_) if class.first() == Some(&b']') => {
                    return Some("[] is an empty set; write \\[ for a [ in a name");
                }
                Some(rest) => rest,
            },
            [_, rest @ ..] => rest,
        };
    }
}

/// The pattern after the class that begins here; `None` if the class is not closed.
fn after_class(mut class: &[u8]) -> Option<&[u8]> {
    loop {
        class = match class {
            [] | [b'\\'] => return None,
            [b']', rest @ ..] => return Some(rest),
            [b'\\', _, rest @ ..] | [_, b'-', _, rest @ ..] | [_, rest @ ..] => rest,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_that_matches_no_name_has_a_reason() {
        for pattern in ["", "[", "a[b", "[]", "x[]y", "[\\]", "[a-]", "\\\\[", "[a][", "[^"] {
            assert!(why_no_match(pattern).is_some(), "{pattern}");
        }
        for pattern in
            ["*", "?", "\\[", "[a]", "[a-c]*", "[^]", "[^a]", "[\\]]", "[[]", "a]", "[a-]]", "\\"]
        {
            assert_eq!(why_no_match(pattern), None, "{pattern}");
        }
    }
}
