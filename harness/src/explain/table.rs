//! A table that is written for the terminal and for the docs alike.

/// A table: one heading a column, rows of as many cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    headings: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table.
    ///
    /// # Panics
    /// When a row has not one cell for each heading: that is a bug of the caller.
    pub fn new<const N: usize>(
        headings: [&str; N],
        rows: impl IntoIterator<Item = [impl Into<String>; N]>,
    ) -> Self {
        Self {
            headings: headings.map(str::to_owned).to_vec(),
            rows: rows.into_iter().map(|row| row.map(Into::into).to_vec()).collect(),
        }
    }

    /// A table of as many columns as there are headings.
    ///
    /// # Panics
    /// When a row has not one cell for each heading: that is a bug of the caller.
    pub fn of(headings: Vec<String>, rows: Vec<Vec<String>>) -> Self {
        assert!(rows.iter().all(|row| row.len() == headings.len()), "one cell for each heading");
        Self { headings, rows }
    }

    /// Columns side by side, the last one as long as it is.
    pub fn to_text(&self) -> String {
        let mut widths: Vec<usize> = self.headings.iter().map(|cell| cell.chars().count()).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in std::iter::once(&self.headings).chain(&self.rows) {
            let mut line = String::new();
            for (width, cell) in widths.iter().zip(row) {
                line += &format!("{cell:<width$}  ");
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// A table of Markdown, as GitHub reads it.
    pub fn to_markdown(&self) -> String {
        let write = |row: &[String]| {
            let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |\n", cells.join(" | "))
        };
        let mut text = write(&self.headings);
        text += &format!("|{}\n", "---|".repeat(self.headings.len()));
        self.rows.iter().for_each(|row| text += &write(row));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_in_text_and_bars_are_escaped_in_markdown() {
        let table = Table::new(["name", "what"], [["a", "x | y"], ["é-longer", "z"]]);
        assert_eq!(table.to_text(), "name      what\na         x | y\né-longer  z\n");
        assert_eq!(table.to_markdown(), "| name | what |\n|---|---|\n| a | x \\| y |\n| é-longer | z |\n");
    }
}
