//! Whom the most of the nodes name.

use crate::holder::Holder;

/// The holder that the most of the nodes name, and how many do. Of several, the one that the first node names: the same
/// answers always say the same, so that a seed of the simulator is a run.
pub(crate) fn strongest<'a, T>(named: impl Iterator<Item = (&'a Holder, T)>) -> Option<(usize, T)> {
    let mut counted: Vec<(usize, &Holder, T)> = Vec::new();
    for (holder, with) in named {
        match counted.iter_mut().find(|(_, known, _)| known.id() == holder.id()) {
            Some((nodes, ..)) => *nodes += 1,
            None => counted.push((1, holder, with)),
        }
    }
    // The last of equals is taken.
    counted.into_iter().rev().max_by_key(|(nodes, ..)| *nodes).map(|(nodes, _, with)| (nodes, with))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_decide_and_of_equals_the_first() {
        let most = |ids: &[&str]| {
            let holders: Vec<_> = ids.iter().map(|id| Holder::known_by_id((*id).to_owned())).collect();
            strongest(holders.iter().enumerate().map(|(node, holder)| (holder, node)))
        };
        assert_eq!(most(&[]), None);
        assert_eq!(most(&["a"]), Some((1, 0)));
        assert_eq!(most(&["a", "b", "b"]), Some((2, 1)));
        assert_eq!(most(&["b", "a", "a", "b", "c"]), Some((2, 0)));
    }
}
