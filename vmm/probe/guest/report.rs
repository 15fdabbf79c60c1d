//! A list of findings, printed twice: as lines for people, and as one line of JSON.
use core::fmt::{self, Write};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    Pass,
    Fail,
    Info,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Info => "info",
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Value {
    Number(u64),
    /// A string in JSON, `"0x1f"`, which has no hexadecimal numbers.
    Hex(u64),
    Flag(bool),
    Text(&'static str),
}

const FIELDS: usize = 14;
const FINDINGS: usize = 96;

#[derive(Clone, Copy)]
pub(crate) struct Finding {
    name: &'static str,
    verdict: Verdict,
    fields: [(&'static str, Value); FIELDS],
    used: usize,
}

impl Finding {
    fn new(name: &'static str, verdict: Verdict) -> Self {
        Self { name, verdict, fields: [("", Value::Flag(false)); FIELDS], used: 0 }
    }

    /// A finding that cannot fail.
    pub(crate) fn info(name: &'static str) -> Self {
        Self::new(name, Verdict::Info)
    }

    /// A finding that passes or fails.
    pub(crate) fn check(name: &'static str, right: bool) -> Self {
        Self::new(name, if right { Verdict::Pass } else { Verdict::Fail })
    }

    /// Fails the finding unless `right` is true.
    pub(crate) fn and(self, right: bool) -> Self {
        Self { verdict: if right { self.verdict } else { Verdict::Fail }, ..self }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn verdict(&self) -> Verdict {
        self.verdict
    }

    fn get(&self, key: &str) -> Option<Value> {
        let fields = &self.fields[..self.used];
        fields.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// A numeric field; 0 if there is none.
    pub(crate) fn count(&self, key: &str) -> u64 {
        match self.get(key) {
            Some(Value::Number(number) | Value::Hex(number)) => number,
            Some(Value::Flag(flag)) => flag.into(),
            _ => 0,
        }
    }

    /// A text field; empty if there is none.
    pub(crate) fn text_of(&self, key: &str) -> &'static str {
        match self.get(key) {
            Some(Value::Text(text)) => text,
            _ => "",
        }
    }

    fn with(mut self, key: &'static str, value: Value) -> Self {
        self.fields[self.used] = (key, value);
        self.used += 1;
        self
    }

    pub(crate) fn number(self, key: &'static str, value: u64) -> Self {
        self.with(key, Value::Number(value))
    }

    pub(crate) fn hex(self, key: &'static str, value: u64) -> Self {
        self.with(key, Value::Hex(value))
    }

    pub(crate) fn flag(self, key: &'static str, value: bool) -> Self {
        self.with(key, Value::Flag(value))
    }

    pub(crate) fn text(self, key: &'static str, value: &'static str) -> Self {
        self.with(key, Value::Text(value))
    }

    /// Prints a line such as `pass  timer          ticks=10 period_us=2000`.
    pub(crate) fn line(&self, to: &mut dyn Write) -> fmt::Result {
        write!(to, "{}  {:<13}", self.verdict.name(), self.name)?;
        for (key, value) in &self.fields[..self.used] {
            match value {
                Value::Number(number) => write!(to, " {key}={number}")?,
                Value::Hex(number) => write!(to, " {key}={number:#x}")?,
                Value::Flag(flag) => write!(to, " {key}={}", if *flag { "yes" } else { "no" })?,
                Value::Text(text) if text.contains(' ') => write!(to, " {key}=\"{text}\"")?,
                Value::Text(text) => write!(to, " {key}={text}")?,
            }
        }
        to.write_char('\n')
    }

    fn json(&self, to: &mut dyn Write) -> fmt::Result {
        write!(to, "{{\"name\":\"{}\",\"verdict\":\"{}\"", self.name, self.verdict.name())?;
        for (key, value) in &self.fields[..self.used] {
            write!(to, ",\"{key}\":")?;
            match value {
                Value::Number(number) => write!(to, "{number}")?,
                Value::Hex(number) => write!(to, "\"{number:#x}\"")?,
                Value::Flag(flag) => write!(to, "{flag}")?,
                Value::Text(text) => quoted(text, to)?,
            }
        }
        to.write_char('}')
    }
}

/// Writes `text` as a JSON string.
pub(crate) fn quoted(text: &str, to: &mut dyn Write) -> fmt::Result {
    to.write_char('"')?;
    for character in text.chars() {
        match character {
            '"' | '\\' => write!(to, "\\{character}")?,
            '\0'..='\x1f' => write!(to, "\\u{:04x}", u32::from(character))?,
            _ => to.write_char(character)?,
        }
    }
    to.write_char('"')
}

pub(crate) struct Report {
    findings: [Option<Finding>; FINDINGS],
    used: usize,
    dropped: u64,
    ok: bool,
}

impl Report {
    pub(crate) const fn new() -> Self {
        Self { findings: [None; FINDINGS], used: 0, dropped: 0, ok: true }
    }

    /// Prints a finding and keeps it for the JSON line. Findings that do not fit are only counted.
    pub(crate) fn add(&mut self, finding: Finding, to: &mut dyn Write) {
        finding.line(to).ok();
        self.ok &= finding.verdict != Verdict::Fail;
        match self.findings.get_mut(self.used) {
            Some(free) => {
                *free = Some(finding);
                self.used += 1;
            }
            None => self.dropped += 1,
        }
    }

    /// Oldest first.
    pub(crate) fn findings(&self) -> impl Iterator<Item = &Finding> + Clone {
        self.findings.iter().flatten()
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Finding> {
        self.findings().find(|finding| finding.name == name)
    }

    pub(crate) fn is_ok(&self) -> bool {
        self.ok
    }

    pub(crate) fn json(&self, to: &mut dyn Write) -> fmt::Result {
        write!(to, "{{\"probe\":1,\"ok\":{},\"dropped\":{},\"findings\":[", self.ok, self.dropped)?;
        for (index, finding) in self.findings.iter().flatten().enumerate() {
            if index > 0 {
                to.write_char(',')?;
            }
            finding.json(to)?;
        }
        to.write_str("]}\n")
    }
}
