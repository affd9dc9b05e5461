//! The state of a type is in the file of the type: files below it call its methods.

use std::collections::BTreeMap;

use super::source::{code, library};

/// Types whose fields the files below theirs may read.
const SHARED: [&str; 2] = [
    // Its fields are the parts that it connects. None of them changes after the start.
    "Manager", // Settings: plain values.
    "Config",
];

/// The items of a file whose head begins with one of `heads`: the head, and the lines of the body.
fn items<'a>(code: &'a str, heads: &[&str]) -> Vec<(&'a str, Vec<&'a str>)> {
    let mut items = Vec::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        let item = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub(super) "));
        let item = item.or(line.strip_prefix("pub ")).unwrap_or(line);
        if heads.iter().any(|head| item.starts_with(head)) && line.ends_with('{') {
            items.push((item, lines.by_ref().take_while(|line| *line != "}").collect()));
        }
    }
    items
}

fn is_name_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The first name in a text.
fn first_name(text: &str) -> &str {
    let start = text.find(is_name_part).unwrap_or(text.len());
    let text = &text[start..];
    &text[..text.find(|c| !is_name_part(c)).unwrap_or(text.len())]
}

/// The private fields of a struct.
fn private_fields<'a>(body: &[&'a str]) -> Vec<&'a str> {
    let fields = body.iter().filter_map(|line| line.strip_prefix("    "));
    let fields = fields.filter_map(|line| line.split_once(':')).map(|(name, _)| name);
    fields.filter(|name| !name.is_empty() && name.chars().all(is_name_part)).collect()
}

/// The type of an `impl` block, without its parameters.
fn type_of(head: &str) -> &str {
    let head = head.strip_prefix("impl").unwrap_or(head);
    let head = match head.strip_prefix('<') {
        Some(parameters) => parameters.split_once("> ").map_or(parameters, |(_, head)| head),
        None => head,
    };
    first_name(head.split_once(" for ").map_or(head, |(_, head)| head))
}

/// The fields that a block reads through `self`.
fn own_fields(body: &[&str]) -> Vec<String> {
    let text: String = body.iter().map(|line| line.trim_start()).collect();
    let parts = text.split("self.").skip(1);
    let names = parts.filter_map(|part| {
        let name = first_name(part);
        (part.starts_with(name) && !part[name.len()..].starts_with('(')).then(|| name.to_owned())
    });
    names.collect()
}

#[test]
fn items_are_found_with_their_fields() {
    let code = "pub(crate) struct Held<'a> {\n    first: &'a str,\n    pub(crate) open: u32,\n}\n\
                impl Trait for Held<'_> {\n    fn f(&self) {\n        self.first;\n        self\n\
                \x20           .open;\n        self.call();\n    }\n}";
    let held = items(code, &["struct "]);
    assert_eq!(held.len(), 1);
    assert_eq!((first_name(&held[0].0["struct ".len()..]), private_fields(&held[0].1)), {
        ("Held", vec!["first"])
    });
    let blocks = items(code, &["impl"]);
    assert_eq!((type_of(blocks[0].0), own_fields(&blocks[0].1)), {
        ("Held", vec!["first".to_owned(), "open".to_owned()])
    });
    assert_eq!(type_of("impl<T: Send> Slot<T> {"), "Slot");
}

#[test]
fn private_fields_are_used_in_the_file_of_their_type() {
    let is_test = |file: &str| file.starts_with("src/verify/") || file.ends_with("/tests.rs");
    let files = library().into_iter().filter(|file| !is_test(file));
    let files: Vec<_> = files.map(|file| (code(&file), file)).collect();
    let mut fields = BTreeMap::new();
    for (code, file) in &files {
        for (head, body) in items(code, &["struct "]) {
            let below = file.trim_end_matches(".rs").trim_end_matches("/mod");
            let name = first_name(&head["struct ".len()..]);
            fields.insert((name, format!("{below}/")), (file, private_fields(&body)));
        }
    }
    let mut wrong = Vec::new();
    for (code, file) in &files {
        for (head, body) in items(code, &["impl"]) {
            let name = type_of(head);
            for ((of, below), (own, private)) in &fields {
                let is_elsewhere = *of == name && file.starts_with(below) && file != *own;
                if is_elsewhere && !SHARED.contains(&name) {
                    let used = own_fields(&body).into_iter();
                    let used = used.filter(|field| private.contains(&field.as_str()));
                    wrong.extend(used.map(|field| format!("{file}: {name}::{field}")));
                }
            }
        }
    }
    assert!(fields.len() > 100, "only {} structs were found", fields.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}
