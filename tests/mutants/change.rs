//! A patch: one change to the code that breaks a promise on purpose, and the test that must detect
//! it. Each is a file in `tests/mutants/patches`.

use std::{fs, path::Path};

/// Label of the one header line that is optional.
const FAILS_WITH: &str = "fails with: ";

/// The contents of a patch.
#[derive(Debug)]
pub(crate) struct Change {
    /// File name without its extension.
    pub(crate) name: String,
    /// Number of the broken promise in docs/promises.md.
    pub(crate) promise: String,
    /// Name of the defect in the literature.
    pub(crate) known_as: String,
    /// What the changed code does, as a sentence.
    pub(crate) says: String,
    pub(crate) test: Test,
    /// Text that the test must print. Proves that it fails for this reason and not for another.
    pub(crate) fails_with: Option<String>,
    pub(crate) edits: Vec<Edit>,
}

/// A test: its target, and its path within that target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    pub(crate) target: String,
    pub(crate) path: String,
}

/// A text that occurs once in a file, and its replacement.
#[derive(Debug)]
pub(crate) struct Edit {
    pub(crate) file: String,
    from: String,
    to: String,
}

impl Change {
    /// Reads all patches, sorted by file name.
    pub(crate) fn all(home: &Path) -> Result<Vec<Change>, String> {
        let folder = home.join("tests/mutants/patches");
        let entries =
            fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        files.iter().map(|file| Change::read(file)).collect()
    }

    fn read(file: &Path) -> Result<Change, String> {
        let text =
            fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let name = file.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        Change::parse(&name, &text).map_err(|wrong| format!("{}: {wrong}", file.display()))
    }

    fn parse(name: &str, text: &str) -> Result<Change, String> {
        let mut lines = text.lines().peekable();
        let mut header = |label: &str| {
            let line = lines.next().unwrap_or_default();
            let value = line.strip_prefix(label).and_then(|rest| rest.strip_prefix(": "));
            value.map(str::to_owned).ok_or(format!("expected `{label}: …`, found `{line}`"))
        };
        let (promise, known_as) = (header("promise")?, header("known as")?);
        let (says, test) = (header("change")?, header("test")?);
        let (target, path) =
            test.split_once(' ').ok_or("expected `test: target path::of::the::test`")?;
        let test = Test { target: target.to_owned(), path: path.to_owned() };
        let fails_with = lines
            .next_if(|line| line.starts_with(FAILS_WITH))
            .map(|line| line[FAILS_WITH.len()..].to_owned());
        let mut edits = Vec::new();
        while let Some(line) = lines.next() {
            let file =
                line.strip_prefix("file: ").ok_or(format!("expected `file: …`, found `{line}`"))?;
            let mut part = |end: &str| {
                let mut part = Vec::new();
                loop {
                    match lines.next() {
                        Some(line) if line == end => return Ok(part.join("\n")),
                        Some(line) => part.push(line),
                        None => return Err(format!("`{end}` is missing")),
                    }
                }
            };
            if !part("<<<<")?.is_empty() {
                return Err("`<<<<` must follow the line with the file".into());
            }
            edits.push(Edit { file: file.to_owned(), from: part("====")?, to: part(">>>>")? });
        }
        match edits.is_empty() {
            true => Err("the patch changes nothing".into()),
            false => Ok(Change {
                name: name.to_owned(),
                promise,
                known_as,
                says,
                test,
                fails_with,
                edits,
            }),
        }
    }

    /// Returns the files that the patch changes, before and after. An error if it does not fit the
    /// code any more.
    pub(crate) fn applied(&self, home: &Path) -> Result<Vec<Applied>, String> {
        let mut files: Vec<Applied> = Vec::new();
        for edit in &self.edits {
            let at = match files.iter().position(|known| known.file == edit.file) {
                Some(at) => at,
                None => {
                    let text = fs::read_to_string(home.join(&edit.file));
                    let before =
                        text.map_err(|error| format!("{}: {}: {error}", self.name, edit.file))?;
                    files.push(Applied { file: edit.file.clone(), after: before.clone(), before });
                    files.len() - 1
                }
            };
            let text = &mut files[at].after;
            match text.matches(&edit.from).count() {
                1 => *text = text.replacen(&edit.from, &edit.to, 1),
                count => {
                    return Err(format!(
                        "{} does not fit any more: this text occurs {count} times in {}, and must \
                         occur once:\n{}",
                        self.name, edit.file, edit.from
                    ));
                }
            }
        }
        Ok(files)
    }

    /// The row of docs/promises.md for this patch.
    pub(crate) fn row(&self) -> String {
        let Change { name, known_as, says, test, .. } = self;
        format!(
            "| {says} | [{name}](../tests/mutants/patches/{name}.txt) | `{test}` | {known_as} |"
        )
    }
}

/// A file before and after a patch.
#[derive(Debug)]
pub(crate) struct Applied {
    pub(crate) file: String,
    pub(crate) before: String,
    pub(crate) after: String,
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.target.as_str() {
            "lib" => f.write_str(&self.path),
            target => write!(f, "{target}: {}", self.path),
        }
    }
}
