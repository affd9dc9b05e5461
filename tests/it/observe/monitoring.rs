//! The dashboard and the alert rules in docs/monitoring use metrics and labels that exist.

use std::{collections::BTreeSet, process::Command};

use serde_json::Value;

fn read(path: &str) -> String {
    std::fs::read_to_string(format!("{}/docs/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The words in backquotes in the first cells of the tables in docs/metrics.md.
fn documented() -> BTreeSet<String> {
    let first_cell = |line: &str| {
        let cell = line.strip_prefix("| `")?.split('`').next()?;
        Some(cell.to_owned())
    };
    read("metrics.md").lines().filter_map(first_cell).collect()
}

/// Checks the metrics and the labels in a PromQL expression. Returns the number of metrics.
fn check(expression: &str, known: &BTreeSet<String>) -> usize {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: Vec<_> = expression.split(|c| !is_word(c)).collect();
    let metrics: Vec<_> = words.iter().filter(|word| word.starts_with("distlock_")).collect();
    for metric in &metrics {
        let name = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| metric.strip_suffix(suffix))
            .filter(|name| name.ends_with("_seconds"))
            .unwrap_or(metric);
        assert!(known.contains(name), "{metric} does not exist: {expression}");
    }
    // What is compared within braces, or named in `by (...)`.
    let mut labels: Vec<&str> = Vec::new();
    for selector in expression.split('{').skip(1) {
        let selector = selector.split('}').next().unwrap();
        labels.extend(selector.split(',').map(|one| one.split(['=', '!']).next().unwrap().trim()));
    }
    for list in expression.split("by (").skip(1) {
        labels.extend(list.split(')').next().unwrap().split(',').map(str::trim));
    }
    for label in labels {
        let exists = known.contains(label) || matches!(label, "instance" | "le");
        assert!(exists, "no label {label}: {expression}");
    }
    metrics.len()
}

fn expressions(value: &Value) -> Vec<&str> {
    match value {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| match value {
                Value::String(text) if name == "expr" || name == "query" => vec![&**text],
                _ => expressions(value),
            })
            .collect(),
        Value::Array(all) => all.iter().flat_map(expressions).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn dashboard_uses_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(&read("monitoring/grafana.json")).unwrap();
    let known = documented();
    let used: usize = expressions(&dashboard).iter().map(|text| check(text, &known)).sum();
    assert!(used > 20, "{used}");
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}

#[test]
fn alerts_use_metrics_that_exist() {
    let (rules, known) = (read("monitoring/alerts.yml"), documented());
    let alerts: Vec<_> = rules.split("- alert: ").skip(1).collect();
    assert!(alerts.len() >= 5);
    for alert in &alerts {
        let expression = alert.split_once("expr: ").unwrap().1;
        // It ends at the next key.
        let lines = expression.lines().take_while(|line| {
            let key = line.trim_start().split(':').next().unwrap();
            !matches!(key, "for" | "labels" | "annotations")
        });
        assert!(check(&lines.collect::<Vec<_>>().join(" "), &known) > 0, "{alert}");
    }
    let file = format!("{}/docs/monitoring/alerts.yml", env!("CARGO_MANIFEST_DIR"));
    let load = "import sys, yaml; rules = yaml.safe_load(open(sys.argv[1]))['groups'][0]['rules']; \
                sys.exit(any(not rule['expr'] for rule in rules) or not rules)";
    let readers: [&[&str]; 2] =
        [&["promtool", "check", "rules", &file], &["python3", "-c", load, &file]];
    for reader in readers {
        match Command::new(reader[0]).args(&reader[1..]).output() {
            Ok(output) if String::from_utf8_lossy(&output.stderr).contains("No module named") => {
                println!("NOT SHOWN: python3 has no module yaml");
            }
            Ok(output) => assert!(output.status.success(), "{output:?}"),
            Err(_) => println!("NOT SHOWN: there is no {}", reader[0]),
        }
    }
}
