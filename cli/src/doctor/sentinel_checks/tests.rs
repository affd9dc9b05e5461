use super::*;

const TTL: Duration = Duration::from_secs(10);

/// Three sentinels that all is well with.
fn healthy() -> Vec<AskedSentinel> {
    let view = || {
        let mut view = SentinelView::default();
        view.name = "main".into();
        view.master = "10.0.0.1:6379".into();
        (view.quorum, view.other_sentinels) = (2, 2);
        (view.down_after, view.failover_timeout) = (Duration::from_secs(3), TTL * 6);
        view.replicas = ["10.0.0.2:6379", "10.0.0.3:6379"].map(replica).to_vec();
        view
    };
    let asked = |sentinel: &str| AskedSentinel {
        sentinel: sentinel.into(),
        is_in_url: true,
        view: Ok(view()),
    };
    ["s1:26379", "s2:26379", "s3:26379"].map(asked).into()
}

fn replica(server: &str) -> distlock::SentinelReplica {
    let mut replica = distlock::SentinelReplica::default();
    server.clone_into(&mut replica.server);
    replica.can_be_promoted = true;
    replica
}

fn view(asked: &mut AskedSentinel) -> &mut SentinelView {
    asked.view.as_mut().unwrap()
}

/// The findings that are not `ok`, each with its text.
fn bad(change: impl FnOnce(&mut Vec<AskedSentinel>)) -> Vec<(&'static str, Level, String)> {
    let mut asked = healthy();
    change(&mut asked);
    let findings = check_sentinels(&asked, TTL);
    let bad = findings.into_iter().filter(|finding| finding.level != Level::Ok);
    bad.inspect(|finding| assert!(finding.advice.is_some(), "{finding:?}"))
        .map(|finding| (finding.check, finding.level, finding.message))
        .collect()
}

#[track_caller]
fn expect(found: &[(&'static str, Level, String)], wanted: &[(&str, &str)]) {
    let is_like = |found: &(&str, Level, String), wanted: &(&str, &str)| {
        found.0 == wanted.0 && found.2.contains(wanted.1)
    };
    let all = found.len() == wanted.len()
        && found.iter().zip(wanted).all(|(found, wanted)| is_like(found, wanted));
    assert!(all, "{found:#?} are not {wanted:#?}");
}

#[test]
fn healthy_sentinels_pass() {
    expect(&bad(|_| {}), &[]);
    let findings = check_sentinels(&healthy(), TTL);
    let of = |check| &findings.iter().find(|finding| finding.check == check).unwrap().message;
    assert_eq!(
        of("sentinels"),
        "3 of 3 sentinels answer, and a failover needs 2 of them: 1 may fail"
    );
    assert_eq!(of("master"), "all name 10.0.0.1:6379 as the master (configuration epoch 0)");
    assert!(of("failover").starts_with("takes about 5s, of which down-after-milliseconds is 3s"));
    assert_eq!(of("promotion"), "2 of 2 replicas can become the master");
}

/// Fault: N182
#[test]
fn missing_votes_are_counted() {
    let away = |asked: &mut AskedSentinel| asked.view = Err("refused".into());
    expect(
        &bad(|asked| away(&mut asked[0])),
        &[("sentinel", "no answer: refused"), ("sentinels", "2 of 3 sentinels answer")],
    );
    let found = bad(|asked| asked.iter_mut().for_each(away));
    assert_eq!(found.last().unwrap().1, Level::Problem);
    assert!(found.last().unwrap().2.contains("none of 3 answers"), "{found:?}");
    expect(
        &bad(|asked| view(&mut asked[1]).quorum_failure = Some("NOQUORUM 1 usable".into())),
        &[("sentinels", "no failover is possible: NOQUORUM")],
    );
    expect(
        &bad(|asked| asked.iter_mut().for_each(|asked| view(asked).quorum = 3)),
        &[("sentinels", "needs 3 of them: none may fail")],
    );
    expect(&bad(|asked| view(&mut asked[1]).quorum = 1), &[("sentinels", "quorums differ")]);
    expect(
        &bad(|asked| {
            asked.truncate(2);
            asked.iter_mut().for_each(|asked| view(asked).other_sentinels = 1);
        }),
        &[("sentinels", "2 of 2 sentinels answer, and a failover needs 2 of them: none may")],
    );
    expect(&bad(|asked| asked[2].is_in_url = false), &[("sentinel", "the URL does not")]);
}

/// Fault: N182
#[test]
fn disagreement_about_the_master_is_reported() {
    let found = bad(|asked| {
        view(&mut asked[2]).master = "10.0.0.2:6379".into();
        view(&mut asked[2]).config_epoch = 4;
    });
    expect(
        &found,
        &[(
            "master",
            "s1:26379, s2:26379: 10.0.0.1:6379 as the master (configuration epoch 0); s3",
        )],
    );
    expect(&bad(|asked| view(&mut asked[0]).config_epoch = 1), &[("master", "disagree")]);
    expect(
        &bad(|asked| view(&mut asked[0]).flags = "master,s_down".into()),
        &[("master", "1 of 3 sentinels get no reply from it")],
    );
}

/// Fault: N182
#[test]
fn failover_is_compared_with_the_ttl() {
    let at = |seconds| {
        move |asked: &mut Vec<AskedSentinel>| {
            view(&mut asked[1]).down_after = Duration::from_secs(seconds);
        }
    };
    expect(&bad(at(4)), &[]);
    expect(&bad(at(30)), &[("failover", "takes about 32s")]);
    let findings = check_sentinels(&healthy(), Duration::from_secs(6));
    let finding = findings.iter().find(|finding| finding.check == "failover").unwrap();
    assert_eq!(finding.commands, ["SENTINEL SET main down-after-milliseconds 2000"]);
    assert!(finding.advice.as_ref().unwrap().contains("a ttl of 8s or more"), "{finding:?}");
    let findings = check_sentinels(&healthy(), Duration::from_secs(3));
    let finding = findings.iter().find(|finding| finding.check == "failover").unwrap();
    assert!(finding.commands.is_empty() && finding.level == Level::Warning, "{finding:?}");
}

/// Fault: N182
#[test]
fn replicas_that_cannot_take_over_are_reported() {
    let each = |change: fn(&mut SentinelView)| {
        bad(|asked| asked.iter_mut().for_each(|asked| change(view(asked))))
    };
    expect(&each(|view| view.replicas.clear()), &[("promotion", "none of 0 replicas")]);
    expect(
        &each(|view| view.replicas[1].is_down = true),
        &[("promotion", "1 of 2 replicas are down")],
    );
    expect(
        &each(|view| view.replicas.iter_mut().for_each(|one| one.can_be_promoted = false)),
        &[("promotion", "none of 2 replicas may become the master")],
    );
}
