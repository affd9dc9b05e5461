//! Whom the most of the nodes name.

use crate::holder::Holder;

/// The holder that the most of the nodes name, as most of those tell it, and how many name it.
///
/// A node on which a lock was taken anew gives a later token than the holder has, and a shorter age
/// with it; so of equals the earliest is told. Else it is what the first node says: the same
/// answers always say the same, so that a seed of the simulator is a run.
pub(crate) fn most_reported_holder<'a, T>(
    reported: impl Iterator<Item = (&'a Holder, T)>,
) -> Option<(usize, T)> {
    let reported: Vec<_> = reported.collect();
    let mut agreeing = largest_group(reported, |(one, _), (other, _)| one.id() == other.id());
    // One that is not known is none.
    agreeing.sort_by_key(|(holder, _)| (holder.token() == 0, holder.token()));
    let count = agreeing.len();
    let same_token = largest_group(agreeing, |(one, _), (other, _)| one.token() == other.token());
    same_token.into_iter().next().map(|(_, with)| (count, with))
}

/// The largest group of those that are alike; of equals, that of the first.
fn largest_group<T>(all: Vec<T>, alike: impl Fn(&T, &T) -> bool) -> Vec<T> {
    let mut groups: Vec<Vec<T>> = Vec::new();
    for one in all {
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| alike(first, &one)))
        {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    // The last of equals is taken.
    groups.into_iter().rev().max_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_reported_holder_tie_goes_to_first_node() {
        let most = |ids: &[&str]| {
            let holders: Vec<_> = ids.iter().map(|id| Holder::from_id((*id).to_owned())).collect();
            most_reported_holder(holders.iter().enumerate().map(|(node, holder)| (holder, node)))
        };
        assert_eq!(most(&[]), None);
        assert_eq!(most(&["a"]), Some((1, 0)));
        assert_eq!(most(&["a", "b", "b"]), Some((2, 1)));
        assert_eq!(most(&["b", "a", "a", "b", "c"]), Some((2, 0)));
    }

    #[test]
    fn most_reported_holder_comes_with_most_reported_token() {
        let told = |told: &[(&str, u64)]| {
            let holder =
                |(id, token): &(&str, u64)| Holder::from_report(id.as_bytes(), 1, *token, 0, 100);
            let holders: Vec<_> = told.iter().map(holder).collect();
            most_reported_holder(holders.iter().enumerate().map(|(node, holder)| (holder, node)))
        };
        // Taken anew on the first one.
        assert_eq!(told(&[("a", 9), ("a", 7), ("a", 7)]), Some((3, 1)));
        assert_eq!(told(&[("a", 9), ("a", 7), ("b", 7)]), Some((2, 1)));
        assert_eq!(told(&[("a", 7), ("a", 9), ("a", 9)]), Some((3, 1)), "not the earliest of all");
        assert_eq!(told(&[("a", 9), ("a", 7), ("a", 8)]), Some((3, 1)), "of equals the earliest");
        assert_eq!(told(&[("a", 0), ("a", 7)]), Some((2, 1)), "of equals one that is known");
        assert_eq!(told(&[("b", 7), ("a", 9), ("b", 7), ("a", 7), ("a", 7)]), Some((3, 3)));
        assert_eq!(told(&[("a", 0), ("a", 7), ("a", 7)]), Some((3, 1)), "it does not know");
    }
}
