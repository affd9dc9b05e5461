//! The connections of a subscription over several nodes.

use super::*;

/// An attempt for a link that was dropped can end after another one for the same node.
#[test]
fn connection_that_no_link_awaits_is_ignored() {
    let (router, name) = Router::unreachable();
    let mut stream = ClusterGrantStream::open(&router, "distlock:client:x").unwrap();
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

/// The reply to `SUNSUBSCRIBE` comes after the slot has been requested again.
///
/// Fault: N260
#[test]
fn slot_requested_again_after_its_end_is_subscribed() {
    const MANAGER: &str = "distlock:client:x";
    let (router, name) = Router::unreachable();
    let mut stream = ClusterGrantStream::open(&router, MANAGER).unwrap();
    let part = router.part(&name).unwrap();
    let (number, now) = (part.number, clock::now());
    let connection = part.node.reserved_connection();
    let subscriber = Subscriber::over(part.node.clone(), connection, Duration::from_secs(1));
    // It was subscribed, then given up, and has been requested again.
    let state = LinkState::Up { subscriber: Box::new(subscriber), asked: [7].into() };
    stream.links.insert(number, Link { part: part.clone(), state, failures: 0 });
    stream.slots.insert(7, number);
    assert!(!router.subscriptions.request(7));
    let receive = |stream: &mut ClusterGrantStream, kind: &str| {
        let words = [kind, &channel_of_slot(MANAGER, 7)].map(|word| Value::BulkString(word.into()));
        stream.on_value(number, &Value::Array(words.into()), now, &mut BTreeSet::new());
    };
    receive(&mut stream, "sunsubscribe");
    stream.subscribe(7, &part, now);
    receive(&mut stream, "ssubscribe");
    assert!(router.subscriptions.request(7), "it is subscribed");
}
