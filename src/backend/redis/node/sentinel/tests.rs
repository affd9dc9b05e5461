use super::*;

fn master(config_epoch: u64, port: u16) -> Master {
    let address = Address::Tcp(([127, 0, 0, 1], port).into());
    let host = "127.0.0.1".to_owned();
    Master { config_epoch, host, label: port.to_string(), addresses: vec![address] }
}

#[test]
fn newest_reply_decides_and_never_an_older_one() {
    let (old, new) = (master(3, 1), master(4, 2));
    assert_eq!(choose(vec![&old, &new, &old], None), Some(&new));
    assert_eq!(choose(vec![&old, &new, &old], Some(&old)), Some(&new));
    assert_eq!(choose(vec![&old, &old, &old], Some(&new)), Some(&new));
    assert_eq!(choose(vec![], Some(&new)), Some(&new));
    assert_eq!(choose(vec![], None), None);
}

#[test]
fn most_sentinels_decide_within_an_epoch() {
    let (one, other) = (master(4, 1), master(4, 2));
    assert_eq!(choose(vec![&one, &other, &other], Some(&one)), Some(&other));
    assert_eq!(choose(vec![&one, &other], Some(&one)), Some(&one));
    assert_eq!(choose(vec![&other, &one], Some(&one)), Some(&one));
}

/// The name of a master has several addresses, which come in any order.
#[test]
fn other_order_of_addresses_is_no_other_master() {
    let (first, second) = (master(4, 1), master(4, 2));
    let both = |one: &Master, other: &Master| {
        let addresses = [&one.addresses[..], &other.addresses[..]].concat();
        Master { addresses, ..first.clone() }
    };
    let mut known = Known { replies: vec![None], ..Known::default() };
    for reply in [both(&first, &second), both(&second, &first), second.clone()] {
        assert_eq!(known.learn(0, Ok(reply)), None);
    }
    assert!(known.learn(0, Ok(master(5, 3))).is_some());
}

#[test]
fn connection_waits_briefly_for_further_sentinels() {
    let at = |ms: u64| Moment::from_nanos(ms * 1_000_000);
    let wait = |replies: &[Option<(u64, bool)>]| {
        let reply =
            |is_ok: bool| is_ok.then(|| master(1, 1)).ok_or_else(|| Failure::passing("refused"));
        let replies = replies.iter().map(|one| one.map(|(ms, ok)| (at(ms), reply(ok))));
        let known = Known { replies: replies.collect(), ..Known::default() };
        known.wait_until(at(1_000), at(2_000))
    };
    assert_eq!(wait(&[None, None]), at(2_000));
    assert_eq!(wait(&[Some((900, true)), None]), at(2_000), "a reply to an older request");
    assert_eq!(wait(&[Some((1_200, false)), None]), at(2_000));
    assert_eq!(wait(&[Some((1_200, true)), None]), at(1_300));
    assert_eq!(wait(&[Some((1_950, true)), None]), at(2_000));
    assert_eq!(wait(&[Some((1_200, true)), Some((1_250, false))]), at(1_000), "all replied");
}

#[test]
fn replies_are_parsed() {
    let reply = |text: &str| redis::parse_redis_value(text.as_bytes()).unwrap();
    let state = reply("*4\r\n$4\r\nname\r\n$1\r\nm\r\n$12\r\nconfig-epoch\r\n$2\r\n17\r\n");
    let address = reply("*2\r\n$9\r\n127.0.0.1\r\n$4\r\n6379\r\n");
    assert_eq!(parse(&state, &address), Some((17, "127.0.0.1".into(), 6379)));
    for bad in [Value::Nil, reply("*1\r\n$1\r\nx\r\n"), reply("*2\r\n$1\r\nh\r\n$5\r\n99999\r\n")] {
        assert_eq!(parse(&state, &bad), None, "{bad:?}");
        assert_eq!(parse(&bad, &address), None, "{bad:?}");
    }
}
