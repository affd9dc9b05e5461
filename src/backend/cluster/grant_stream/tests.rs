//! The connections of a subscription over several nodes.

use super::*;

/// An attempt for a link that was dropped can end after another one for the same node.
#[test]
fn connection_that_no_link_awaits_is_ignored() {
    let (router, name) = Router::unreachable();
    let mut stream =
        ClusterGrantStream::open(&router, &Arc::default(), "distlock:client:x").unwrap();
    let part = router.part(&name).unwrap();
    let number = part.number;
    let link = Link { part: part.clone(), state: LinkState::Connecting, failures: 0 };
    stream.links.insert(number, link);
    let connected = || Connected {
        node: usize::try_from(number).unwrap(),
        connection: part.node.reserved_connection(),
        outcome: Ok(()),
    };
    stream.on_connected(connected());
    match &mut stream.links.get_mut(&number).unwrap().state {
        LinkState::Up { asked, .. } => asked.push_back(7),
        _ => panic!("it is not connected"),
    }
    stream.on_connected(connected());
    assert!(
        matches!(&stream.links[&number].state, LinkState::Up { asked, .. } if asked.len() == 1)
    );
}
